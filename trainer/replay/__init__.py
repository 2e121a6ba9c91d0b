"""Trajectories that went well, kept to learn from where a whole group fails.

`trajectory` is what is kept, `reader` reads what others kept, `pool` keeps and picks, `injection` says when.

Of slime and AReaL it knows nothing. An adapter calls it in this order, once a group is complete and before the group is
filtered for having no signal:

```python
pool = ReplayPool.resume(directory, settings) if saved else ReplayPool(settings)
pool.load(read_jsonl(path, success_at=settings.success_at).trajectories)       # demonstrations, if any

injection = inject(pool, task_id, raw_rewards)    # the checker's scores in order of members; None for a void one
if injection is not None:
    row = injection.trajectory.rows[0]            # tokens, response_length, loss_mask, log_probs: as they were sampled
    ...                                           # write it over member injection.index; reward: injection.reward
                                                  # note injection.off_policy.value with the sample
for member, score in succeeded:                   # only what this policy did itself, never what was injected
    pool.add(StoredTrajectory(task_id=..., messages=..., images=..., reward=score, rows=...))
pool.save(directory, name=str(rollout_id))        # with each checkpoint
```
"""
