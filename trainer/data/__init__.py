"""Data for training, made of tasks and of trajectories: prompts for rollouts, and conversations to warm up on.

`split` says who is held out, `prompts` makes rows of tasks, `oracles` and `record` play what is known to solve them,
`dataset` joins trajectories and says what it left out, `sft` makes rows for a supervised warm-up, `tables` writes.
"""
