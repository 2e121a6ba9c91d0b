"""`trainer play`: play one episode by hand, with no actions, by an oracle or by a model, and show it live."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue

from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, err, out
from trainer.agent.prompts import prompt_hash
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message, Outcome, Reply, Trajectory
from trainer.cli.options import DEFAULT_SCREEN, LIST_TIMEOUT, Screen, Target, make_client, read_screen
from trainer.cli.output import UsageError, reports_errors
from trainer.cli.run_file import RunConfig, read_run
from trainer.data.oracles import Oracle, read_oracles
from trainer.data.record import OracleConversation
from trainer.evaluate.chat import ChatConversation
from trainer.evaluate.endpoint import open_endpoint
from trainer.evaluate.play import ConversationFactory, attempt_of, play_attempt
from trainer.evaluate.players import HELP, HumanPlayer, NullPlayer, Player
from trainer.evaluate.replay import directory_name
from trainer.evaluate.report import write_report
from trainer.evaluate.results import Attempt, Results, Run
from trainer.evaluate.selection import Selection, select, served_tasks


@reports_errors(OSError)
def play_command(
    *,
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task's id, SUITE/NAME.")],
    file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="File with settings.")] = None,
    by: Annotated[Player, typer.Option(metavar="PLAYER", help="Player: hand, null, oracle or model.")] = "hand",
    oracles: Annotated[
        Path | None, typer.Option(help="For --by oracle: output of `envd tasks oracles` on the daemon's host.")
    ] = None,
    screen: Screen = DEFAULT_SCREEN,
    endpoint: Annotated[str, typer.Option(help="For --by model: base URL of an OpenAI-compatible API.")] = "",
    model: Annotated[str, typer.Option(help="The model's name; default: the only served one.")] = "",
    envd: Target = "",
    directory: Annotated[
        Path | None, typer.Option("--out", help="Directory for pictures and page; default: out/play.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Play one episode and show observations, replies, actions and the score.

    docs/evaluation.md lists the keys of RUN.toml; flags override them.
    """
    config = read_run(file, {"endpoint": endpoint, "model": model, "envd": envd})
    if (by != "model" and endpoint) or (by == "model" and not config.endpoint):
        raise UsageError("--by model requires --endpoint URL, and only --by model accepts it")
    if (by == "oracle") != (oracles is not None):
        raise UsageError(
            "--oracles FILE: give it with --by oracle, and only then; `envd tasks oracles` writes the file"
        )
    # A person points at pixels of the picture; a model has its own units.
    settings = config.settings(coordinates="pixels" if by == "hand" else None)
    directory = directory or config.out or Path("out/play")
    place = directory / directory_name(task, 0)
    solution = None if oracles is None else _oracle_of(task, oracles)

    def show(item: Message | Reply) -> None:
        if isinstance(item, Message):
            for part in item.parts:
                if isinstance(part, str):
                    _say(part)
        elif by != "hand":
            _say(item.text)

    async def play() -> tuple[Attempt, Trajectory]:
        async with make_client(config.envd, config.tls_ca, run=config.run) as client:
            (one,) = select(await served_tasks(client, named=[task], timeout=LIST_TIMEOUT), Selection(task_ids=[task]))
            player = _player(by, settings, config, oracle=solution, screen_px=read_screen(screen), place=place)
            async with player as new_conversation:
                began_s = time.monotonic()
                trajectory = await play_attempt(
                    client, one, new_conversation, settings=settings, pool=config.pool, replay=place, show=show
                )
                seconds = time.monotonic() - began_s
                return attempt_of(trajectory, one, seed=0, seconds=seconds, replay=place.name), trajectory

    attempt, trajectory = asyncio.run(play())
    run = Run(label=f"{task} by {by}", settings=_settings(by, config), prompt_hash=prompt_hash(settings))
    page = directory / f"{place.name}.html"
    if config.report:
        write_report(Results(run, [attempt]), page)
    if as_json:
        emit_json({**attempt.model_dump(mode="json"), "page": str(page) if config.report else None})
    else:
        _print_result(attempt, trajectory.outcome, page if config.report else None)
    if trajectory.outcome is Outcome.FAILED:
        raise typer.Exit(EXIT_FAILED)


@asynccontextmanager
async def _player(
    by: Player,
    settings: AgentSettings,
    config: RunConfig,
    *,
    oracle: Oracle | None,
    screen_px: tuple[int, int],
    place: Path,
) -> AsyncIterator[ConversationFactory]:
    grammar = settings.make_grammar()
    match by:
        case "null":
            yield lambda _seed: NullPlayer(grammar)
        case "oracle" if oracle is not None:
            known = oracle
            yield lambda _seed: OracleConversation(known, settings, screen_px=screen_px)
        case "hand":
            lines = _lines(sys.stdin.fileno())

            async def ask(prompt: str) -> str | None:
                newest = max(place.glob("*.webp"), default=place)
                err.print(f"picture: {newest}\n{prompt}", end="", markup=False, soft_wrap=True)
                return await anext(lines, None)

            _say(HELP)
            yield lambda _seed: HumanPlayer(grammar, ask=ask, say=_say)
        case "model":
            sampling = config.sampling(settings)
            async with open_endpoint(config.endpoint, key=config.key()) as server:
                name = config.model or await server.only_model()
                yield lambda seed: ChatConversation(server, model=name, sampling=sampling, seed=seed)


def _say(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)


def _settings(by: Player, config: RunConfig) -> dict[str, JsonValue]:
    if by != "model":
        return {"by": by}
    return {
        "by": by,
        "endpoint": config.endpoint,
        "model": config.model or "the only served one",
        "temperature": config.temperature,
    }


def _oracle_of(task_id: str, file: Path) -> Oracle:
    for oracle in read_oracles(file):
        if oracle.task_id == task_id:
            return oracle
    raise UsageError(f"--oracles {file} has none for {task_id}; `envd tasks oracles` on the daemon's host prints them")


def _print_result(attempt: Attempt, outcome: Outcome, page: Path | None) -> None:
    if attempt.score is None:
        kind = "stopped" if outcome is Outcome.ABORTED else "void"
        out.print(f"{kind}: {attempt.reason} {attempt.error}".rstrip(), markup=False, soft_wrap=True)
    else:
        turns = "turn" if attempt.turn_count == 1 else "turns"
        out.print(f"score {attempt.score:.2f} after {attempt.turn_count} {turns} ({attempt.reason})", markup=False)
        for check in attempt.checks:
            out.print(f"  {check.score:.2f} {check.name}: {check.evidence}", markup=False, soft_wrap=True)
    if page is not None:
        err.print(f"wrote {page}", markup=False, soft_wrap=True)


async def _lines(fd: int) -> AsyncIterator[str]:
    """Yield the lines of a file descriptor without their newlines."""
    buffer = b""
    while True:
        await _readable(fd)
        data = os.read(fd, 4096)
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if not data:
            break
    if buffer:
        yield buffer.decode(errors="replace")


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
    except PermissionError:  # a regular file is always readable
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
