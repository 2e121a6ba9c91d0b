"""A daemon with drawn desktops in this process: its settings, its files, and calls of its service."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envd.api.security.tokens import NewToken
from envd.base.config import Config, SettlePolicy
from envd.base.config_sources import load
from envd.daemon.composition import Daemon
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.types import ForkCommand, ResetCommand, StepCommand

NO_PIXELS = ObservationOptions(encoding=Encoding.NONE)
#: Flag of a daemon that serves a console.
WITH_CONSOLE = {"console_listen": "127.0.0.1:0"}


def fake_config(directory: Path, flags: Mapping[str, object] | None = None) -> Config:
    """Return settings for drawn desktops on free ports, with state and cache below `directory`."""
    return load(
        flags={
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "state_dir": directory / "state",
            "cache_dir": directory / "cache",
            "hypervisor.uri": "fake",
            **(flags or {}),
        }
    )


def write_tokens(directory: Path, tokens: Iterable[NewToken]) -> Path:
    """Write the file of tokens for a daemon, or replace it; return its path."""
    file = directory / "tokens"
    file.touch(mode=0o600)
    file.write_text("".join(f"{token.line}\n" for token in tokens))
    return file


class ConsoleDaemon:
    """A daemon with a console, and calls that give it something to show."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.url = f"http://{daemon.console_address}"

    async def open(self, size: int = 1, *, run: str = "", owner: str = "", task: str = "fake/save-note") -> list[str]:
        """Open a group; return its episodes' ids."""
        command = ResetCommand(
            request_id=f"reset-{run}-{owner}-{task}-{size}".replace("/", "-"),
            task_id=task,
            group_size=size,
            run=run,
            owner=owner,
            settle=SettlePolicy(quiet_ms=20, max_ms=2000),
            observe=NO_PIXELS,
        )
        return [info.episode_id for info in (await self.daemon.service.reset(command)).episodes]

    async def step(self, episode_id: str, index: int, *actions: Any) -> None:
        """Perform all actions in one step."""
        command = StepCommand(
            request_id=f"step-{index}", episode_id=episode_id, step_index=index, actions=actions, observe=NO_PIXELS
        )
        await self.daemon.service.step(command)

    async def fork(self, episode_id: str, index: int, *, count: int = 1) -> list[str]:
        """Branch an episode; return the branches' ids."""
        command = ForkCommand(
            request_id=f"fork-{index}", episode_id=episode_id, step_index=index, fork_count=count, observe=NO_PIXELS
        )
        return [info.episode_id for info in (await self.daemon.service.fork(command)).episodes]
