"""OSWorld's own `DesktopEnv` on envd's machines: the import of this module is all that its runner needs.

```python
import envd.osworld.provider  # before DesktopEnv is made
from desktop_env.desktop_env import DesktopEnv

env = DesktopEnv(provider_name="docker", action_space="pyautogui", screen_size=(1280, 800))
```
`docker` is a name that `DesktopEnv` lets pass and whose machines it takes for fresh ones; no Docker is asked. A machine
is an episode of the task `osworld/desktop`; going back to a snapshot takes a new fork, of what was saved or else of the
pool's template. DesktopEnv talks to the guest's service itself, which needs a pool with `allow_guest_access`, and it
expects the guest to run between its calls, which needs `always_running`.

The daemon's address is `ENVD_ADDRESS` (127.0.0.1:50051 if it is not set), the pool `ENVD_POOL` (the only one that
fits), the token `ENVD_TOKEN`.
"""

import os

from desktop_env import desktop_env

from envd.osworld.desktop_machines import EnvdManager, EnvdProvider


def make_manager_and_provider(
    provider_name: str,  # noqa: ARG001
    region: str | None,  # noqa: ARG001
    use_proxy: bool = False,  # noqa: ARG001
) -> tuple[EnvdManager, EnvdProvider]:
    """Stand in for OSWorld's function of that purpose: whatever is asked for, envd's machines are given."""
    address = os.environ.get("ENVD_ADDRESS", "127.0.0.1:50051")
    provider = EnvdProvider(address, pool=os.environ.get("ENVD_POOL", ""), token=os.environ.get("ENVD_TOKEN", ""))
    return EnvdManager(), provider


# DesktopEnv's module holds the function by name: to replace it in `desktop_env.providers` would change nothing.
desktop_env.create_vm_manager_and_provider = make_manager_and_provider
