"""Programs about `trainer learn` that need a checkout: `python -m tests.tools.learning COMMAND`.

`arms` changes rollouts for an ablation, by the files in `settings`; `comparison` compares the arms of finished runs;
`replay` draws a task before and after reinforcement; `rollout_bench` measures what a turn costs the trainer.
"""
