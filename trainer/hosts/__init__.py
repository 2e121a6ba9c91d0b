"""KVM hosts in a Ray cluster: one actor per host runs its daemon, and a supervisor starts the actors.

```text
trainer hosts up ──► Supervisor (one detached actor) ──► HostActor (one per node with a resource envd_POOL)
                                                            │ starts or adopts, probes, restarts, drains
clients ── cuaenv.client.ray_cluster: report() ────────────►│
        ── gRPC: Reset, Step, ... ────────────────────────► envd serve (outlives the actor)
```
"""
