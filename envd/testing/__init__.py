"""Fakes, in-process servers and contract suites, shipped for users' own tests."""
