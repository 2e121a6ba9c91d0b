"""Run OSWorld's own `DesktopEnv` on envd's machines: its runner only has to import this module.

```python
import envd.integrations.osworld.provider  # before DesktopEnv is made
from desktop_env.desktop_env import DesktopEnv

env = DesktopEnv(provider_name="docker", action_space="pyautogui", screen_size=(1280, 800))
```
`docker` is a name that `DesktopEnv` accepts and whose machines it treats as fresh; Docker itself is not used. A machine
is an episode of the task `osworld/desktop`; reverting to a snapshot creates a new fork, of the saved state or of the
pool's template. DesktopEnv talks to the guest's service itself, so the pool needs `allow_guest_access`, and it expects
the guest to run between its calls, so the pool needs `always_running`.

Environment variables: the daemon's address `ENVD_ADDRESS` (default 127.0.0.1:50051), the pool `ENVD_POOL` (default: the
only one that fits), the token `ENVD_TOKEN`, and for TLS the authority's certificate `ENVD_TLS_CA` and, if the daemon
requires it, this client's `ENVD_TLS_CERT` and `ENVD_TLS_KEY`. A token is never sent to another host in clear text.
"""

from desktop_env import desktop_env

from envd.integrations.osworld import desktop_machines
from envd.integrations.osworld.desktop_machines import EnvdProvider


def make_manager_and_provider(
    provider_name: str,  # noqa: ARG001
    region: str | None,  # noqa: ARG001
    use_proxy: bool = False,  # noqa: ARG001
) -> tuple[EnvdProvider, EnvdProvider]:
    """Replace OSWorld's factory: return envd's machines for every provider name."""
    return desktop_machines.make_manager_and_provider()


# DesktopEnv's module has imported the function by name, so replacing it in `desktop_env.providers` has no effect.
desktop_env.create_vm_manager_and_provider = make_manager_and_provider
