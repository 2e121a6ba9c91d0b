# ruff: noqa: F403, F405 -- the names of `__all__` come from the modules that define them
"""The client of `CUAEnv`: act on desktops, with deadlines, exactly-once steps and typed errors.

```python
from cuaenv.client import Click, Done, EnvClient, PressKeys, TypeText

with EnvClient("127.0.0.1:50051") as client, client.reset("desktop/type-greeting") as episode:
    print(episode.instruction)
    step = episode.step(Click(x=640, y=400), TypeText("Hello, desktop!"), PressKeys(["ctrl", "s"]))
    step.observation.image.save("screen.png")
    episode.step(Done())
    print(episode.evaluate().score)
```

`client.open(task)` and `episode.close()` do the same without a block. A client closes at its end the episodes that are
still open.

`AsyncEnvClient` is the same with `async with` and `await`, for many episodes at once. `reset_group` opens a group of
episodes in one state, `fork` branches an episode in its current state, and `attach` takes over an episode of an earlier
process. What they return can be awaited, or entered as a block that closes the episodes. `checkpoint` stores a state on
disk, in which `reset` opens episodes later. `forward` opens a local port that leads to a port of an episode's guest,
such as a browser's DevTools. Both clients accept several hosts and open episodes on those with free machines;
`shared_client` returns one client for all event loops of a process. See docs/client.md.

Every call has a deadline. A lost call is retried until then under the same request id, so the service performs it once;
actions are never repeated. If the daemon was never reached, a call fails after `RetryPolicy.connect_timeout` (10 s).
The lease of an open episode is renewed however long a model thinks. Leaving the block closes the episode; if this
process dies, the lease expires.

If a daemon requires a token, pass `token=` or set the variable `ENVD_TOKEN`; `tls=Tls(ca=Path("ca.pem"))` encrypts the
connection. A token is never sent to another host in clear text.

The agent's mistakes are in `StepResult.errors`, which is empty if all actions succeeded. All other failures are an
`EnvError`:

```text
EnvError
├── BadRequest            fix the caller; `field` names what is wrong
├── NotFound              fix the name, or reset another episode
│   └── EpisodeNotFound, TaskNotFound, CheckpointNotFound
├── EpisodeEnded          stop, and evaluate
│   └── GuestEnded        the guest ended itself (power-off, panic, killed session); the episode is scored
├── Refused               not possible in the present state; nothing was done
│   ├── GroupTooLarge     the pool or the run's quota can never hold that many
│   ├── GuestRefused, NotForkable, CheckpointUnusable, CheckpointStoreFull
│   └── NotSupported      the daemon's release or its settings do not have this call
├── Conflict              someone else stepped the episode or rolled it back; abandon it
│   └── HumanInControl    a person controls the episode in the console; call handed_back()
├── AccessDenied          ask the operator
│   └── Unauthenticated   the daemon requires a valid token
├── Exhausted             try again later
│   └── PoolExhausted, RateLimited
├── Unavailable           use another host, or try again later
│   ├── Unreachable       it never was reached: not started, a wrong target, or only one side uses TLS
│   ├── Draining          it is stopping
│   └── DeadlineExceeded  no response before the deadline; what the call did is unknown
├── ClientClosed          the client, or the episode during a call, was closed; or the process was forked
└── SampleVoid            a fault of the service: never train on the episode
    └── MachineLost, LossUndecided, GuestFailed, SetupFailed, EvaluatorFailed
```
"""

from types import FunctionType

from cuaenv.actions import *
from cuaenv.client.async_client import AsyncEnvClient
from cuaenv.client.credentials import Tls
from cuaenv.client.episode import AsyncEpisode
from cuaenv.client.errors import *
from cuaenv.client.forwarding import PortForward
from cuaenv.client.host import HostState, HostStatistics
from cuaenv.client.host_pool import ClientStatistics
from cuaenv.client.observation import Element, Observation
from cuaenv.client.placement import RetryPolicy
from cuaenv.client.results import *
from cuaenv.client.shared import ClientSettings, close_shared_clients, shared_client
from cuaenv.client.sync_client import EnvClient, Episode
from cuaenv.client.view import Perturb, Settle, View

# In full: type checkers do not evaluate sums of lists. A test compares it with the modules' own.
__all__ = [
    "AccessDenied",
    "Action",
    "AskUser",
    "AsyncEnvClient",
    "AsyncEpisode",
    "BadRequest",
    "Button",
    "CallTool",
    "Check",
    "Checkpoint",
    "CheckpointNotFound",
    "CheckpointStoreFull",
    "CheckpointUnusable",
    "Click",
    "ClientClosed",
    "ClientSettings",
    "ClientStatistics",
    "CommandResult",
    "Conflict",
    "DeadlineExceeded",
    "Done",
    "Drag",
    "Draining",
    "EditFile",
    "Element",
    "EnvClient",
    "EnvError",
    "Episode",
    "EpisodeEnded",
    "EpisodeInfo",
    "EpisodeNotFound",
    "Evaluation",
    "EvaluatorFailed",
    "Exhausted",
    "Fail",
    "GroupTooLarge",
    "GuestEnded",
    "GuestFailed",
    "GuestRefused",
    "Handover",
    "HostState",
    "HostStatistics",
    "HumanInControl",
    "KeyDown",
    "KeyUp",
    "ListDirectory",
    "LossUndecided",
    "MachineLost",
    "MouseDown",
    "MouseUp",
    "Move",
    "NotForkable",
    "NotFound",
    "NotSupported",
    "Observation",
    "Origin",
    "Perturb",
    "Pool",
    "PoolExhausted",
    "PortForward",
    "PressKeys",
    "QueuedGroup",
    "RateLimited",
    "ReadFile",
    "Refused",
    "RetryPolicy",
    "RunShell",
    "SampleVoid",
    "ScreenChange",
    "Scroll",
    "Server",
    "Settle",
    "SetupFailed",
    "State",
    "StepResult",
    "Task",
    "TaskNotFound",
    "Tls",
    "ToolResult",
    "TypeText",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
    "UnrecordedRequest",
    "View",
    "Wait",
    "WriteFile",
    "close_shared_clients",
    "shared_client",
]

# Tracebacks, `help` and pickles name the path that all import from.
for _name in __all__:
    if isinstance(globals()[_name], type | FunctionType):
        globals()[_name].__module__ = __name__
