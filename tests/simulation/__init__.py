"""Simulate many hosts on a virtual clock, through the planner, fair share and choice of hosts that production uses.

```text
workload ── groups ──► placement (drawn: the client's code | ideal)
                           │ a host
                           ▼
                       SimHost: AdmissionQueue and plan() of envd.pool; machines fork, are leased, are destroyed
```

Not simulated: CPU contention on a host, the network, and the time that Python takes.

`parked` simulates one host whose idle episodes are parked, with its cores.
"""
