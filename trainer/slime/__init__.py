"""slime's rollouts on our desktops. slime finds the hooks by path; nothing here imports slime before it is called.

```text
--custom-generate-function-path          trainer.slime.hooks.generate
--custom-reward-post-process-path        trainer.slime.hooks.normalize_rewards
--dynamic-sampling-filter-path           trainer.slime.hooks.keep_informative
--data-source-path                       trainer.slime.hooks.data_source   checks rows; saves replays, aborted samples
--custom-rm-path                         trainer.slime.hooks.reward_func
--custom-rollout-log-function-path       trainer.slime.hooks.log_rollout
--custom-eval-rollout-log-function-path  trainer.slime.hooks.log_evaluation
--custom-advantage-function-path         trainer.slime.hooks.advantages          with `envd.credit: siblings`
--rollout-sample-hook-path               trainer.slime.hooks.record_sample
--rollout-function-path                  trainer.slime.hooks.generate_rollout    for a supervised warm-up
--custom-config-path                     a YAML file; its mapping `envd:` is trainer.slime.config.SlimeConfig
```

Three rooms: `hooks` is what slime calls. `job` is what all samples of one configuration share in a process, with
`checks` of slime's arguments, data, hosts and engine, and the `monitor` of finished episodes. `play` runs one sample
and knows no job. One sample:

```text
slime's loop                                 hooks.log_rollout ◄── batch ◄── hooks.keep_informative
     │ sample                                                       ▲
     ▼                                                              │ filled or void sample
hooks.generate ──► job.Job.run ──► ready: checks (once)             │           ──► monitor.record
                        │                                           │
                        ▼ (in a process of play.workers)            │
play.rollout.play ──► Rollout ──► agent.attempts.run_task ──► agent.loop ──► samples.fill, rewards
                                      │ reset                 │ generate           │ step, evaluate
                                      ▼                       ▼                    ▼
                              Rollout.reset           TokenConversation      AsyncEpisode
                                      │ a machine             │ sample             │ gRPC
                                      ▼                       ▼                    ▼
                       Forks: members of a group      SlimeEngine:           daemon
                              open it together        SGLang's /generate
                       Tree:  members branch from
                              each other mid-episode
```
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Modules of 0.2.0 that flags and hooks of users name.
_FORMER = ("credit", "filters", "generate", "group", "metrics", "replay", "rewards", "samples", "sft")


class _FormerNames:
    """Refuses modules whose names are in `trainer.slime.hooks` now. Last in `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG004
        package, _, module = name.rpartition(".")
        if package == __name__ and module in _FORMER:
            raise ModuleNotFoundError(
                f"{name}: its names are in trainer.slime.hooks; write trainer.slime.hooks.NAME in slime's flags",
                name=name,
            )
        return None


sys.meta_path.append(_FormerNames)
