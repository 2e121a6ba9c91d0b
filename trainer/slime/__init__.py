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
`checks` of slime's arguments, data, hosts and engine, and the `monitor` of finished episodes. `play` plays one sample
and knows no job. The walk of one sample, from slime's call to the service and back:

```text
hooks.generate                              slime's call
  Job.play_sample                           checks of the job, once; at the end monitor.record
    Workers.play_sample                     with worker processes, the next line happens in one
    Job.play_here                           a time limit; any error makes the sample void
      Rollout.play_attempts                 until slime aborts it
        attempts.play_task                  each attempt on a machine of its own
          Rollout.reset                     opens an episode: where an aborted sample continues, or
            GroupMember.reset               Groups.member ──► AsyncEnvClient.open_group ──► Reset
            TreeMember.reset                Tree.member: waits for a branch of another member
          Rollout.play_episode              from the start, a branch point, or where it was interrupted
            loop.play_episode               turns, and then AsyncEpisode.evaluate ──► Evaluate
              _PlayedEpisode.play_turns     until the episode or its limit ends
                _PlayedEpisode._play_turn   TokenConversation.generate ──► SlimeEngine.sample ──► SGLang's /generate
                                            _act ──► AsyncEpisode.step ──► Step
      Rollout.result_of                     the reward, and samples.fill: the sample or its rows
hooks.keep_informative                      of each group
hooks.log_rollout, normalize_rewards        of the batch
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
