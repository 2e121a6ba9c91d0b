"""The commands of `envd checkpoints`: list, delete, export and import the checkpoints of running daemons."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cuaenv.cli.terminal import Json, emit, emit_json, err, out
from cuaenv.client import AsyncEnvClient, Checkpoint
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.remote import CALL_TIMEOUT, DAEMON_OPTIONS, RemoteDaemon, since
from envd.cli.terminal import columns, printable

app = typer.Typer(
    no_args_is_help=True,
    help="List, open, delete, export and import checkpoints: states of episodes that outlive them.",
)


@app.command("list")
@command(DAEMON_OPTIONS)
def list_(
    daemon: RemoteDaemon,
    *,
    run: Annotated[str, typer.Option(metavar="RUN", help="Only those of this run.")] = "",
    task: Annotated[str, typer.Option(metavar="TASK", help="Only those of this task.")] = "",
    episode: Annotated[str, typer.Option(metavar="EPISODE", help="Only those of this episode.")] = "",
    as_json: Json = False,
) -> None:
    """List checkpoints, oldest first; with a token, those that it may see."""
    found = daemon.call(
        lambda client: client.list_checkpoints(run=run, task=task, episode_id=episode, timeout=CALL_TIMEOUT)
    )
    if as_json:
        emit_json({"checkpoints": [_fields(checkpoint) for checkpoint in found]})
    elif found:
        out.print(table(found, now=datetime.now(UTC)))
    else:
        err.print("no checkpoints")


@app.command("show")
@command(DAEMON_OPTIONS)
def show(
    daemon: RemoteDaemon,
    *,
    checkpoint_id: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Id of a checkpoint.")],
    as_json: Json = False,
) -> None:
    """Show one checkpoint, and those that it descends from, the nearest first."""

    async def read(client: AsyncEnvClient) -> tuple[Checkpoint, list[Checkpoint]]:
        checkpoint = await client.get_checkpoint(checkpoint_id, timeout=CALL_TIMEOUT)
        return checkpoint, await client.list_checkpoints(timeout=CALL_TIMEOUT)

    checkpoint, found = daemon.call(read)
    fields = {**_fields(checkpoint), "ancestors": _ancestors(checkpoint, found)}
    if as_json:
        emit_json(fields)
        return
    for key, value in fields.items():
        text = " ".join(value) if isinstance(value, list) else str(value)
        out.print(f"{key:<21} {printable(text)}".rstrip(), markup=False, soft_wrap=True)


@app.command("open")
@command(DAEMON_OPTIONS)
def open_(
    daemon: RemoteDaemon,
    *,
    checkpoint_id: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Id of a checkpoint.")],
) -> None:
    """Open an episode in the state of a checkpoint until Ctrl-C, for the console or `envd forward`. Prints its id."""

    async def hold() -> None:
        async with daemon.client() as client:
            checkpoint = await client.get_checkpoint(checkpoint_id, timeout=CALL_TIMEOUT)
            async with client.reset(checkpoint) as episode:
                out.print(episode.episode_id)
                err.print(
                    f"{episode.task_id} at step {episode.step_count}; the daemon's console shows it; Ctrl-C closes it",
                    markup=False,
                    soft_wrap=True,
                )
                await asyncio.Event().wait()

    try:
        asyncio.run(hold())
    except KeyboardInterrupt:
        err.print("closed")


@app.command("delete")
@command(DAEMON_OPTIONS)
def delete(
    daemon: RemoteDaemon,
    *,
    checkpoint_ids: Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="Ids of checkpoints.")],
    as_json: Json = False,
) -> None:
    """Delete checkpoints; nothing if one of the ids is unknown. Episodes that were opened from them continue."""
    wanted = list(dict.fromkeys(checkpoint_ids))

    async def delete_all(client: AsyncEnvClient) -> None:
        for checkpoint in [await client.get_checkpoint(each, timeout=CALL_TIMEOUT) for each in wanted]:
            await client.delete_checkpoint(checkpoint, timeout=CALL_TIMEOUT)

    daemon.call(delete_all)
    emit({"deleted": wanted}, f"deleted {', '.join(wanted)}", as_json=as_json)


@app.command("export")
@command(DAEMON_OPTIONS)
def export(
    daemon: RemoteDaemon,
    *,
    checkpoint_id: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Id of a checkpoint.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; one that exists is replaced.")],
    as_json: Json = False,
) -> None:
    """Write a checkpoint to a file, for `envd checkpoints import` on another host. It contains the guest's memory."""

    async def write(client: AsyncEnvClient) -> int:
        return await client.export_checkpoint(await client.get_checkpoint(checkpoint_id, timeout=CALL_TIMEOUT), file)

    try:
        size_bytes = daemon.call(write)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    written = {"checkpoint_id": checkpoint_id, "file": str(file), "size_bytes": size_bytes}
    emit(written, f"wrote {file}, {size_bytes / (1 << 20):.1f} MiB", as_json=as_json)


@app.command("import")
@command(DAEMON_OPTIONS)
def import_(
    daemon: RemoteDaemon,
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of `envd checkpoints export`.")],
    as_json: Json = False,
) -> None:
    """Store the checkpoint of a file, from a host that you trust. With tokens, this needs one of scope `admin`."""
    try:
        stored = daemon.call(lambda client: client.import_checkpoint(file))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    emit(_fields(stored), f"imported {stored.checkpoint_id}", as_json=as_json)


def _ancestors(checkpoint: Checkpoint, found: Sequence[Checkpoint]) -> list[str]:
    """Return the ids of the checkpoints that one descends from; the last one may have been removed."""
    parents = {each.checkpoint_id: each.parent_checkpoint_id for each in found}
    ids: list[str] = []
    parent = checkpoint.parent_checkpoint_id
    while parent and parent not in ids:
        ids.append(parent)
        parent = parents.get(parent, "")
    return ids


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    times = {name: getattr(checkpoint, name).isoformat(timespec="seconds") for name in ("create_time", "expire_time")}
    fields = {name: value for name, value in asdict(checkpoint).items() if name != "timings_ms"}
    return {**fields, **times}


def table(checkpoints: Sequence[Checkpoint], *, now: datetime) -> Table:
    """Return a table of checkpoints."""
    rows = (
        (
            each.checkpoint_id,
            each.label or "-",
            each.task_id,
            each.episode_id,
            f"{each.step_count}/{each.max_steps}",
            f"{each.size_bytes / (1 << 20):.1f}",
            since(each.create_time, now),
            since(now, each.expire_time) + (" pinned" if each.pinned else f" {each.trigger}" if each.trigger else ""),
        )
        for each in checkpoints
    )
    headings = ("checkpoint", "label", "task", "episode", "step", "MiB", "age", "expires")
    return columns(headings, rows, right=("step", "MiB", "age", "expires"), whole=("checkpoint",))
