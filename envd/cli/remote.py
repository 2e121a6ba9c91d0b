"""What the commands that call a running daemon share: its address, TLS and token, and columns of episodes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.table import Table

from cuaenv.client import AsyncEnvClient, EpisodeInfo, Tls
from envd.base.errors import ConfigError
from envd.cli.command import Argument
from envd.cli.terminal import columns

T = TypeVar("T")

DEFAULT_TARGET: Final = "127.0.0.1:50051"
Target = Annotated[
    str | None,
    typer.Option(
        "--envd",
        metavar="HOST:PORT",
        envvar="ENVD_TARGET",
        show_default=DEFAULT_TARGET,
        help="The daemon, or several with commas. The variable ENVD_TOKEN has the token, if it requires one.",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", metavar="FILE", help="Certificate of the authority that signed the daemon's; enables TLS."
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="FILE", help="This client's certificate, if the daemon requires one."),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="The private key of the client's certificate.")
]
PoolFilter = Annotated[str | None, typer.Option("--pool", help="Only episodes of this pool.")]
RunFilter = Annotated[str | None, typer.Option("--run", help="Only episodes of this training run.")]
#: Timeout of calls: short, so that a missing daemon is reported soon.
CALL_TIMEOUT: Final = timedelta(seconds=10)


class SortKey(StrEnum):
    """A column of episodes to sort by."""

    AGE = "age"
    LEASE = "lease"
    STEPS = "steps"
    TASK = "task"
    RUN = "run"
    POOL = "pool"
    STATE = "state"


_SORT_VALUES: Final[Mapping[SortKey, Callable[[EpisodeInfo], Any]]] = {
    SortKey.AGE: attrgetter("create_time"),
    SortKey.LEASE: attrgetter("expire_time"),
    SortKey.STEPS: attrgetter("step_count"),
    SortKey.TASK: attrgetter("task_id"),
    SortKey.RUN: attrgetter("run"),
    SortKey.POOL: attrgetter("pool"),
    SortKey.STATE: attrgetter("state.value"),
}
Sort = Annotated[SortKey, typer.Option("--sort", metavar="COLUMN", help=f"Sort episodes by {', '.join(SortKey)}.")]
Reverse = Annotated[bool, typer.Option("--reverse", help="Sort in descending order.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDaemon:
    """The daemon that a command calls, or several. Their token comes from `ENVD_TOKEN`."""

    envd: str
    """Addresses, separated by commas."""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def tls(self) -> Tls | None:
        """Return its TLS files, checked; None for clear text. Raises: ConfigError."""
        if self.tls_ca is None:
            if self.tls_cert is not None or self.tls_key is not None:
                raise ConfigError("--tls-cert and --tls-key: no TLS without an authority; add --tls-ca FILE")
            return None
        try:
            tls = Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)
            tls.credentials()
        except ValueError as error:
            raise ConfigError(f"--envd {self.envd}: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot be read: {error.strerror}; check --tls-ca and --tls-cert"
            ) from error
        return tls

    def client(self) -> AsyncEnvClient:
        """Return a client. Raises: ConfigError."""
        try:
            return AsyncEnvClient(self.envd, tls=self.tls())
        except ValueError as error:
            raise ConfigError(f"--envd {self.envd}: {error}") from error

    def call(self, use: Callable[[AsyncEnvClient], Awaitable[T]]) -> T:
        """Use a client and close it. Raises: ConfigError, and what `use` raises."""

        async def run() -> T:
            async with self.client() as client:
                return await use(client)

        return asyncio.run(run())


DAEMON_OPTIONS: Final = Argument(
    options={"envd": Target, "tls_ca": TlsCa, "tls_cert": TlsCert, "tls_key": TlsKey},
    make=lambda given: RemoteDaemon(**{**given, "envd": given["envd"] or DEFAULT_TARGET}),
)
"""The argument of commands that take a `RemoteDaemon`."""


def selected(
    episodes: Iterable[EpisodeInfo], *, pool: str | None, run: str | None, sort: SortKey, reverse: bool
) -> list[EpisodeInfo]:
    """Return the episodes that the filters admit, sorted; those equal by `sort` are sorted by age, oldest first."""
    chosen = [each for each in episodes if pool in {None, each.pool} and run in {None, each.run}]
    return sorted(sorted(chosen, key=attrgetter("create_time")), key=_SORT_VALUES[sort], reverse=reverse)


def episode_fields(episode: EpisodeInfo) -> dict[str, object]:
    """Return an episode as plain data."""
    return {
        "episode_id": episode.episode_id,
        "state": episode.state.value,
        "end_reason": episode.end_reason,
        "task_id": episode.task_id,
        "pool": episode.pool,
        "run": episode.run,
        "step_count": episode.step_count,
        "max_steps": episode.max_steps,
        "group_id": episode.group_id,
        "parent_episode_id": episode.parent_episode_id,
        "create_time": episode.create_time.isoformat(timespec="seconds"),
        "expire_time": episode.expire_time.isoformat(timespec="seconds"),
        "host": episode.host,
    }


def episode_table(episodes: Sequence[EpisodeInfo], *, now: datetime) -> Table:
    """Return a table of episodes, with a column for hosts if there are several."""
    has_hosts = len({episode.host for episode in episodes}) > 1
    headings = ("episode", "state", "task", "pool", "run", "step", "epoch", "age", "lease", *(["host"] * has_hosts))
    rows = (
        (
            episode.episode_id,
            f"{episode.state.value} {episode.end_reason}".strip(),
            episode.task_id,
            episode.pool,
            episode.run or "-",
            f"{episode.step_count}/{episode.max_steps}",
            str(episode.epoch),
            since(episode.create_time, now),
            since(now, episode.expire_time),
            *([episode.host] * has_hosts),
        )
        for episode in episodes
    )
    return columns(headings, rows, right=("step", "epoch", "age", "lease"), whole=("episode",))


def duration_text(seconds: float) -> str:
    """Return a duration for people: `42s`, `3m20s`, `5h07m`, `2d03h`."""
    left = max(0, round(seconds))
    if left < 60:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m{left % 60:02}s"
    if left < 86400:
        return f"{left // 3600}h{left % 3600 // 60:02}m"
    return f"{left // 86400}d{left % 86400 // 3600:02}h"


def since(moment: datetime, now: datetime) -> str:
    """Return the time from `moment` to `now`; see `duration_text`."""
    return duration_text((now - moment).total_seconds())
