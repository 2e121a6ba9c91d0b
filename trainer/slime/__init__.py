"""slime's rollouts on our desktops. slime finds the hooks by path; nothing here imports slime before it is called.

```text
--custom-generate-function-path       trainer.slime.generate.generate
--custom-reward-post-process-path     trainer.slime.group.normalize_rewards
--dynamic-sampling-filter-path        trainer.slime.filters.keep_informative
--data-source-path                    trainer.slime.replay.data_source      checks rows; saves replays, aborted samples
--custom-rm-path                      trainer.slime.rewards.reward_func
--custom-rollout-log-function-path    trainer.slime.metrics.log_rollout
--custom-eval-rollout-log-function-path  trainer.slime.metrics.log_evaluation
--rollout-sample-hook-path            trainer.slime.hooks.record_sample
--rollout-function-path               trainer.slime.sft.generate_rollout      for a supervised warm-up
--custom-config-path                  a YAML file; its mapping `envd:` is trainer.slime.config.SlimeConfig
```

One sample:

```text
slime's loop                                      log_rollout ◄── batch ◄── filters.keep_informative
     │ sample                                                       ▲
     ▼                                                              │ filled or void sample
generate ──► SlimeConfig, checks                                    │
     └──► Rollout ──► agent.attempts.run_task ──► agent.loop ──► samples.fill, rewards
             │                │ reset                 │ generate           │ step, evaluate
             │                ▼                       ▼                    ▼
             │       SampleEnvironments      SglangConversation      AsyncEpisode
             │                │ a machine             │ POST /generate     │ gRPC
             │                ▼                       ▼                    ▼
             │     Forks: members of a group     slime's engine          daemon
             │            open it together
             │     Tree:  members branch from
             │            each other mid-episode
             └──► shared_client: one AsyncEnvClient per event loop
```
"""
