"""`trainer play`: play one episode by hand, with no actions, by an oracle or by a model, and show it live."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, err, out
from cuaenv.client import AsyncEnvClient
from pydantic import JsonValue

from trainer.agent.prompts import prompt_hash
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Conversation, Outcome
from trainer.cli.choice import served_tasks
from trainer.cli.evaluate import KEY_VARIABLE
from trainer.cli.options import (
    DEFAULT_SCREEN,
    DEFAULT_TARGET,
    AgentFile,
    PoolName,
    Screen,
    Target,
    TlsCa,
    make_client,
    read_screen,
    read_settings,
)
from trainer.cli.output import UsageError, reports_errors
from trainer.data.oracles import BadOracle, Oracle, read_oracles
from trainer.data.record import OracleConversation
from trainer.evaluate.chat import ChatConversation, Sampling
from trainer.evaluate.endpoint import EndpointError, open_endpoint, read_key
from trainer.evaluate.play import ConversationFactory, PlayedAttempt, play_task
from trainer.evaluate.players import HELP, EchoConversation, HumanPlayer, NullPlayer
from trainer.evaluate.replay import directory_name
from trainer.evaluate.report import write_report
from trainer.evaluate.results import Results, Run
from trainer.evaluate.selection import Selection, SelectionError, select


class Player(Enum):
    """The player."""

    #: A person who types commands.
    HAND = "hand"
    #: No actions: the task is declared done immediately.
    NULL = "null"
    #: The task's known solution.
    ORACLE = "oracle"
    #: A model behind an endpoint.
    MODEL = "model"


@reports_errors(BadOracle, EndpointError, SelectionError, OSError)
def play_command(
    *,
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task's id, SUITE/NAME.")],
    by: Annotated[Player, typer.Option(help="The player.")] = Player.HAND,
    oracles: Annotated[
        Path | None, typer.Option(help="For --by oracle: output of `envd tasks oracles` on the daemon's host.")
    ] = None,
    screen: Screen = DEFAULT_SCREEN,
    endpoint: Annotated[str, typer.Option(help="For --by model: base URL of an OpenAI-compatible API.")] = "",
    model: Annotated[str, typer.Option(help="The model's name; default: the only served one.")] = "",
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    key_variable: Annotated[str, typer.Option(help="Environment variable with the endpoint's API key.")] = KEY_VARIABLE,
    key_file: Annotated[Path | None, typer.Option(help="File with the endpoint's API key.")] = None,
    envd: Target = DEFAULT_TARGET,
    tls_ca: TlsCa = None,
    pool: PoolName = "",
    agent: AgentFile = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Replies in the episode; default: the agent's.")] = None,
    directory: Annotated[Path, typer.Option("--out", help="Directory for pictures and page.")] = Path("out/play"),
    report: Annotated[bool, typer.Option(help="Write an HTML page.")] = True,
    as_json: Json = False,
) -> None:
    """Play one episode and show observations, replies, actions and the score."""
    if (by is Player.MODEL) != bool(endpoint):
        raise UsageError("--by model requires --endpoint URL, and only --by model accepts it")
    if (by is Player.ORACLE) != (oracles is not None):
        raise UsageError("--by oracle needs --oracles FILE, and only that takes one")
    # A person points at pixels of the picture; a model has its own units.
    coordinates = "pixels" if by is Player.HAND else None
    settings = read_settings(agent, max_turns=max_turns, coordinates=coordinates)
    key = read_key(variable=key_variable, file=key_file) if by is Player.MODEL else ""
    place = directory / directory_name(task, 0)
    solution = None if oracles is None else _oracle_of(task, oracles)

    async def play() -> PlayedAttempt:
        async with (
            make_client(envd, tls_ca) as client,
            _player(
                by,
                settings,
                oracle=solution,
                screen_px=read_screen(screen),
                endpoint=endpoint,
                model=model,
                key=key,
                temperature=temperature,
                place=place,
            ) as new_conversation,
        ):
            return await _play(client, task, new_conversation, settings=settings, pool=pool, place=place)

    played = asyncio.run(play())
    attempt = played.attempt.model_copy(update={"replay": place.name})
    run = Run(
        label=f"{task} by {by.value}",
        settings=_settings(by, endpoint=endpoint, model=model, temperature=temperature),
        prompt_hash=prompt_hash(settings),
    )
    page = directory / f"{place.name}.html"
    if report:
        write_report(Results(run, [attempt]), page)
    if as_json:
        emit_json({**attempt.model_dump(mode="json"), "page": str(page) if report else None})
    else:
        _print_result(played, page if report else None)
    if played.trajectory.outcome is Outcome.FAILED:
        raise typer.Exit(EXIT_FAILED)


async def _play(
    client: AsyncEnvClient,
    task_id: str,
    new_conversation: ConversationFactory,
    *,
    settings: AgentSettings,
    pool: str,
    place: Path,
) -> PlayedAttempt:
    (task,) = select(await served_tasks(client, named=[task_id]), Selection(task_ids=[task_id]))
    return await play_task(client, task, new_conversation, settings=settings, pool=pool, replay=place)


@asynccontextmanager
async def _player(
    by: Player,
    settings: AgentSettings,
    *,
    oracle: Oracle | None,
    screen_px: tuple[int, int],
    endpoint: str,
    model: str,
    key: str,
    temperature: float,
    place: Path,
) -> AsyncIterator[ConversationFactory]:
    grammar = settings.make_grammar()

    def say(text: str) -> None:
        err.print(text, markup=False, soft_wrap=True)

    def shown(conversation: Conversation) -> Conversation:
        return EchoConversation(conversation, say=say, shows_replies=by is not Player.HAND)

    match by:
        case Player.NULL:
            yield lambda _seed: shown(NullPlayer(grammar))
        case Player.ORACLE if oracle is not None:
            known = oracle
            yield lambda _seed: shown(OracleConversation(known, settings, screen_px=screen_px))
        case Player.HAND:
            lines = Lines(sys.stdin.fileno())

            async def ask(prompt: str) -> str | None:
                newest = max(place.glob("*.webp"), default=place)
                err.print(f"picture: {newest}\n{prompt}", end="", markup=False, soft_wrap=True)
                return await lines.read()

            say(HELP)
            yield lambda _seed: shown(HumanPlayer(grammar, ask=ask, say=say))
        case Player.MODEL:
            sampling = Sampling(temperature=temperature, max_reply_tokens=settings.reply_tokens, stop=grammar.stop)
            async with open_endpoint(endpoint, key=key) as server:
                name = model or await server.only_model()
                yield lambda seed: shown(ChatConversation(server, model=name, sampling=sampling, seed=seed))


def _settings(by: Player, *, endpoint: str, model: str, temperature: float) -> dict[str, JsonValue]:
    if by is not Player.MODEL:
        return {"by": by.value}
    return {"by": by.value, "endpoint": endpoint, "model": model or "the only served one", "temperature": temperature}


def _oracle_of(task_id: str, file: Path) -> Oracle:
    for oracle in read_oracles(file):
        if oracle.task_id == task_id:
            return oracle
    raise UsageError(f"--oracles {file} has none for {task_id}; `envd tasks oracles` on the daemon's host prints them")


def _print_result(played: PlayedAttempt, page: Path | None) -> None:
    trajectory, attempt = played.trajectory, played.attempt
    if attempt.score is None:
        kind = "stopped" if trajectory.outcome is Outcome.ABORTED else "void"
        out.print(f"{kind}: {attempt.reason} {attempt.error}".rstrip(), markup=False, soft_wrap=True)
    else:
        turns = "turn" if attempt.turn_count == 1 else "turns"
        out.print(f"score {attempt.score:.2f} after {attempt.turn_count} {turns} ({attempt.reason})", markup=False)
        for check in attempt.checks:
            out.print(f"  {check.score:.2f} {check.name}: {check.evidence}", markup=False, soft_wrap=True)
    if page is not None:
        err.print(f"wrote {page}", markup=False, soft_wrap=True)


class Lines:
    """Reads a file descriptor line by line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""
        self._ended = False

    async def read(self) -> str | None:
        """Return the next line without its newline, or None at the end of input."""
        while b"\n" not in self._buffer and not self._ended:
            await self._readable()
            data = os.read(self._fd, 4096)
            self._ended = not data
            self._buffer += data
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._fd, ready.set)
        except PermissionError:  # a regular file is always readable
            return
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)
