"""Stored successes for groups that failed completely.

`trajectory` is the stored form, `reader` reads files, `pool` stores and picks, `injection` decides when to use one. The
package does not depend on slime or AReaL. An adapter calls it once a group is complete, before a filter drops groups
without a signal:

```python
pool = ReplayPool.resume(directory, settings) if saved else ReplayPool(settings)
pool.load(read_jsonl(path, success_at=settings.success_at).trajectories)

injection = inject(pool, task_id, raw_rewards, start=start)   # the checker's scores by member, None for a void one
if injection is not None:
    row = injection.trajectory.rows[0]            # tokens, response_length, loss_mask, log_probs as sampled
    ...                                           # overwrite member injection.index; its reward is injection.reward
for member, score in succeeded:                   # only the policy's own successes, never injected ones
    pool.add(StoredTrajectory(task_id=..., start=start, messages=..., images=..., reward=score, rows=...))
pool.save(directory, name=str(rollout_id))        # with each checkpoint
```
"""
