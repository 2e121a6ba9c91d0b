"""Tasks as data: instruction, setup, checker, oracle."""
