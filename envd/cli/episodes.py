"""The commands of `envd episodes`: list, show and close the episodes of a running daemon."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from cuaenv.cli.lazy import lazy_group
from cuaenv.cli.terminal import Json, emit, emit_json, err, out
from cuaenv.client import AsyncEnvClient, EpisodeInfo
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.remote import (
    CALL_TIMEOUT,
    DAEMON_OPTIONS,
    PoolFilter,
    RemoteDaemon,
    Reverse,
    RunFilter,
    Sort,
    SortKey,
    episode_fields,
    episode_table,
    selected,
    since,
)
from envd.cli.terminal import printable

_COMMANDS = {"export": ("envd.cli.episodes_export:export", "Write a recorded episode as a video, page or JSON lines.")}

app = typer.Typer(
    cls=lazy_group(_COMMANDS),
    no_args_is_help=True,
    help="List, show and close the episodes of a running daemon; export recorded ones.",
)


@app.command("list")
@command(DAEMON_OPTIONS)
def list_(
    daemon: RemoteDaemon,
    *,
    pool: PoolFilter = None,
    run: RunFilter = None,
    sort: Sort = SortKey.AGE,
    reverse: Reverse = False,
    as_json: Json = False,
) -> None:
    """List the open episodes, oldest first; with a token, those that it may see."""
    found = daemon.call(lambda client: client.list_episodes(timeout=CALL_TIMEOUT))
    episodes = selected(found, pool=pool, run=run, sort=sort, reverse=reverse)
    if as_json:
        emit_json({"episodes": [episode_fields(episode) for episode in episodes]})
        return
    if not episodes:
        err.print("no open episodes" + ("" if not found else f" with these filters; {len(found)} in all"))
        return
    out.print(episode_table(episodes, now=datetime.now(UTC)))


@app.command("show")
@command(DAEMON_OPTIONS)
def show(
    daemon: RemoteDaemon,
    *,
    episode_id: Annotated[str, typer.Argument(metavar="EPISODE", help="An episode's id.")],
    as_json: Json = False,
) -> None:
    """Show one open episode."""
    episode = daemon.call(lambda client: client.get_episode(episode_id, timeout=CALL_TIMEOUT))
    if as_json:
        emit_json(episode_fields(episode))
        return
    now = datetime.now(UTC)
    fields = episode_fields(episode)
    fields["create_time"] = f"{fields['create_time']} ({since(episode.create_time, now)} ago)"
    fields["expire_time"] = f"{fields['expire_time']} (in {since(now, episode.expire_time)})"
    for key, value in fields.items():
        out.print(f"{key:<17} {printable(str(value))}", markup=False, soft_wrap=True)


@app.command("close")
@command(DAEMON_OPTIONS)
def close(
    daemon: RemoteDaemon,
    *,
    episode_ids: Annotated[list[str], typer.Argument(metavar="EPISODE...", help="Ids of episodes.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Close episodes and destroy their machines. Their clients get EPISODE_NOT_FOUND; unscored work is lost.

    Closes nothing if one of the ids is unknown.
    """
    wanted = list(dict.fromkeys(episode_ids))

    async def find_all(client: AsyncEnvClient) -> list[EpisodeInfo]:
        return [await client.get_episode(episode_id, timeout=CALL_TIMEOUT) for episode_id in wanted]

    episodes = daemon.call(find_all)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("close: not confirmed, and standard input is not a terminal; add --yes")
        err.print(episode_table(episodes, now=datetime.now(UTC)))
        typer.confirm(f"Close {len(episodes)} episode{'s' * (len(episodes) > 1)}?", abort=True, err=True)

    async def close_all(client: AsyncEnvClient) -> None:
        for episode in episodes:
            await client.close_episode(episode, timeout=CALL_TIMEOUT)

    daemon.call(close_all)
    emit({"closed": wanted}, f"closed {', '.join(wanted)}", as_json=as_json)
