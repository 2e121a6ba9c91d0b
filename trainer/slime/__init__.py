"""slime's rollout on our desktops. Name the hooks by path; nothing here imports slime until it is called.

```text
--custom-generate-function-path       trainer.slime.generate.generate
--custom-reward-post-process-path     trainer.slime.group.normalize_rewards
--dynamic-sampling-filter-path        trainer.slime.filters.keep_informative
--data-source-path                    trainer.slime.replay.data_source      with `envd.replay`
--custom-rm-path                      trainer.slime.rewards.reward_func
--custom-rollout-log-function-path    trainer.slime.metrics.log_rollout
--custom-eval-rollout-log-function-path  trainer.slime.metrics.log_evaluation
--rollout-sample-hook-path            trainer.slime.hooks.record_sample
--rollout-function-path               trainer.slime.sft.generate_rollout      for a supervised warm-up
--custom-config-path                  a YAML file whose `envd:` mapping is trainer.slime.config.SlimeConfig
```
"""
