"""Learn on one GPU from drawn desktops: `trainer learn`.

```text
base     screens drawn and asked about in worker processes ──► a Qwen3-VL that reads, where `demos` and `clone` start
demos    oracles played by daemons ──► frames and token rows, on disk
clone    rows ──► supervised training of a small Qwen3-VL from random weights
rl       worker processes: slime's rollout ─► trainer.slime.hooks.generate ─► daemons
             │ POST /generate                    │ slime's train data
             ▼                                   ▼
         engine (this process) ◄─ weights ─ learner: slime's advantages and loss
report   metrics ──► results.json and plots
```

Rollouts, conversion, advantages and the policy loss are slime's own code; only Megatron and SGLang are replaced, by a
plain optimiser and a small batched engine with the same `/generate`. Needs torch, transformers and a checkout of slime.
"""


class LearnError(RuntimeError):
    """The run cannot start or continue; the message names the thing, the problem and the remedy."""
