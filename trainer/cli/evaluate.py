"""`trainer eval`: success rate of a model, or of a checkpoint before and after training."""

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue

from cuaenv.cli.terminal import EXIT_FAILED, Json, emit_json, err, out, progress
from cuaenv.client import AsyncEnvClient, Task
from trainer.agent.prompts import prompt_hash
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Conversation
from trainer.cli.compare import print_comparison, print_summary
from trainer.cli.options import LIST_TIMEOUT, Target, TlsCa, make_client
from trainer.cli.output import UsageError, reports_errors
from trainer.cli.run_file import RunConfig, read_run
from trainer.evaluate.chat import ChatConversation, Sampling
from trainer.evaluate.comparison import compare
from trainer.evaluate.endpoint import checked_url, open_endpoint
from trainer.evaluate.native import load_chat, native_conversations
from trainer.evaluate.play import ConversationFactory, EvaluationStopped, evaluate
from trainer.evaluate.players import NullPlayer, Player
from trainer.evaluate.report import write_report
from trainer.evaluate.results import Results, ResultsFile, Run
from trainer.evaluate.selection import Selection, SplitName, choose, served_tasks
from trainer.evaluate.summary import summarise
from trainer.tokens.chat import Chat

#: Exit status of an evaluation that finished with attempts lost to errors.
EXIT_LOST_ATTEMPTS = 3
#: Above this the endpoint is likely to be the bottleneck.
_MAX_CONCURRENCY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the evaluations of one command share."""

    config: RunConfig
    directory: Path
    selection: Selection
    settings: AgentSettings
    sampling: Sampling
    chat: Chat | None
    """Chat template for SGLang's `/generate`; None for chat completions."""
    key: str


@reports_errors(EvaluationStopped, OSError, to_continue="repeat the command to continue")
def eval_command(
    *,
    file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="File with settings.")] = None,
    endpoint: Annotated[
        str, typer.Option(help="Base URL of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model's name; default: the only served one.")] = "",
    by: Annotated[
        Player, typer.Option(metavar="PLAYER", help="model, or null: the score of doing nothing, without a model.")
    ] = "model",
    before: Annotated[str, typer.Option(help="Base URL of the checkpoint before training; requires --after.")] = "",
    after: Annotated[str, typer.Option(help="Base URL of the checkpoint after training.")] = "",
    perturb: Annotated[
        bool, typer.Option("--perturb", help="Compare clean desktops with perturbed ones: pop-ups, themes, windows.")
    ] = False,
    envd: Target = "",
    tls_ca: TlsCa = None,
    task: Annotated[list[str], typer.Option(help="Only this task; may be repeated.")] = [],  # noqa: B006 -- typer's way
    limit: Annotated[int | None, typer.Option(min=0, help="Most tasks, always the same; 0 for all.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Attempts at each task; needs a temperature.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of the sampling; 0, the default, is greedy.")
    ] = None,
    split: Annotated[SplitName | None, typer.Option(help="Side of the split of `trainer data`; default: all.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Directory for the results; default: out/eval.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on a daemon's tasks, or compare two: trainer eval --before URL --after URL.

    With --perturb the same model is evaluated on clean and on perturbed desktops, and both are compared.

    docs/evaluation.md lists the keys of RUN.toml; flags override them.

    Repeat the same command to continue; attempts that were lost to errors are repeated. Exit status: 0 if every
    attempt has a score, 3 if some were lost to errors, 1 if all were lost or the evaluation stopped, 2 for wrong
    arguments.
    """
    flags = {
        "endpoint": endpoint,
        "model": model,
        "before": before,
        "after": after,
        "envd": envd,
        "tls_ca": tls_ca,
        "select.limit": limit,
        "seeds": seeds,
        "temperature": temperature,
        "split": split,
        "perturb": perturb or None,
    }
    config = read_run(file, flags)
    candidates, settings = _candidates(config, by), config.settings()
    plan = _Plan(
        config=config,
        directory=directory or config.out or Path("out/eval"),
        selection=config.selection(task),
        settings=settings,
        sampling=config.sampling(settings),
        chat=None if config.checkpoint is None else load_chat(config.checkpoint),
        key=config.key(),
    )
    for candidate in candidates:
        if candidate.endpoint:
            checked_url(candidate.endpoint, with_key=bool(plan.key))
    files = asyncio.run(_evaluate_all(make_client(config.envd, config.tls_ca, run=config.run), candidates, plan))
    results = [Results.read(file) for file in files]
    _report(results, files, with_pages=config.report, as_json=as_json)
    if status := _exit_status(results):
        raise typer.Exit(status)


async def _evaluate_all(client: AsyncEnvClient, candidates: list[RunConfig], plan: _Plan) -> list[Path]:
    """Evaluate one after the other, so that they do not compete for machines. Returns the results files."""
    config = plan.config
    async with client:
        if config.split == "all":
            err.print("[yellow]note:[/] all tasks are played, training tasks too; see --split held_out")
        served = await served_tasks(client, named=plan.selection.task_ids, timeout=LIST_TIMEOUT)
        tasks = choose(
            served,
            plan.selection,
            split=config.split,
            include_unrunnable=config.include_unrunnable,
            note=lambda text: err.print(f"[yellow]note:[/] {text}", soft_wrap=True),
        )
        pools = await client.list_pools(timeout=LIST_TIMEOUT)
        capacity = sum(one.capacity for one in pools if config.pool in {"", one.name})
        concurrency = config.concurrency or max(1, min(capacity, _MAX_CONCURRENCY))
        return [
            await _evaluate_one(client, candidate, plan, tasks=tasks, concurrency=concurrency)
            for candidate in candidates
        ]


async def _evaluate_one(
    client: AsyncEnvClient, candidate: RunConfig, plan: _Plan, *, tasks: list[Task], concurrency: int
) -> Path:
    config = plan.config
    async with AsyncExitStack() as stack:
        url, model, new_conversation = await _player(stack, candidate, plan)
        label = candidate.label or model
        path = plan.directory / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', label).strip('-.') or 'run'}.jsonl"
        run = Run(
            label=label,
            settings={
                **_settings_json(plan, url=url, model=model, tasks=tasks),
                **({"perturbed": True} if candidate.perturb else {}),
            },
            prompt_hash=prompt_hash(plan.settings),
        )
        file = stack.enter_context(ResultsFile(path, run))

        await evaluate(
            client,
            tasks,
            new_conversation,
            file=file,
            settings=plan.settings,
            seeds=config.seeds,
            concurrency=concurrency,
            pool=config.pool,
            replays=config.replays,
            is_perturbed=candidate.perturb,
            report=stack.enter_context(progress(f"eval {label}")),
        )
    return path


async def _player(stack: AsyncExitStack, candidate: RunConfig, plan: _Plan) -> tuple[str, str, ConversationFactory]:
    """Return the URL and the name of a model, and what begins its conversations."""
    if not candidate.endpoint:
        grammar = plan.settings.make_grammar()
        return "", "null", lambda _seed: NullPlayer(grammar)
    server = await stack.enter_async_context(open_endpoint(candidate.endpoint, key=plan.key))
    model = candidate.model or await (server.only_model() if plan.chat is None else server.model_path())
    if plan.chat is not None:
        native = native_conversations(server, plan.chat, settings=plan.settings, sampling=plan.sampling)
        return server.url, model, native

    def chat_completions(seed: int) -> Conversation:
        return ChatConversation(server, model=model, sampling=plan.sampling, seed=seed)

    return server.url, model, chat_completions


def _settings_json(plan: _Plan, *, url: str, model: str, tasks: list[Task]) -> Mapping[str, JsonValue]:
    """Return everything that determines an attempt; never the key."""
    settings: dict[str, JsonValue] = {
        "endpoint": url,
        "model": model,
        "api": "chat completions" if plan.chat is None else "generate",
        "sampling": _plain(asdict(plan.sampling)),
        "agent": _plain(plan.settings.recorded()),
        "task_versions": {task.task_id: task.version for task in tasks},
    }
    return settings


def _plain(value: object) -> JsonValue:
    """Return a value as JSON types, so that it equals the value read back."""
    plain: JsonValue = json.loads(json.dumps(value, default=str))
    return plain


def _exit_status(results: list[Results]) -> int:
    """Return `EXIT_FAILED` if a run has no score, `EXIT_LOST_ATTEMPTS` if attempts were lost to errors, else 0."""
    if any(all(attempt.is_error for attempt in one.attempts) for one in results):
        return EXIT_FAILED
    return EXIT_LOST_ATTEMPTS if any(attempt.is_error for one in results for attempt in one.attempts) else 0


def _report(results: list[Results], files: list[Path], *, with_pages: bool, as_json: bool) -> None:
    pages = [file.with_suffix(".html") for file in files] if with_pages else []
    for one, page in zip(results, pages, strict=False):
        write_report(one, page)
    comparison = compare(*results) if len(results) == 2 else None
    if as_json:
        emit_json(
            {
                "runs": [asdict(summarise(one)) for one in results],
                "comparison": None if comparison is None else asdict(comparison),
                "results": [str(file) for file in files],
                "reports": [str(page) for page in pages],
            }
        )
        return
    for one in results:
        print_summary(summarise(one), out)
    if comparison is not None:
        print_comparison(comparison, out)
    for path in [*files, *pages]:
        err.print(f"wrote {path}", markup=False, soft_wrap=True)


def _candidates(config: RunConfig, by: Player = "model") -> list[RunConfig]:
    """Return the configuration of each model to evaluate: with its own `endpoint`, `model`, `label` and `perturb`.

    `endpoint` is empty for the player `null`; with `perturb`, all attempts are in perturbed worlds, drawn from seeds.

    Raises:
        UsageError: The flags name no model, or too many.
    """
    if by == "null":
        if config.endpoint or config.before or config.after or config.model:
            raise UsageError("--by null plays without a model; leave out endpoint, model, before and after")
        return [replace(config, perturb=False), replace(config, label="perturbed")] if config.perturb else [config]
    if by != "model":
        raise UsageError(f"--by {by} plays one episode: see `trainer play`; use model or null here")
    if config.perturb:
        if not config.endpoint or config.before or config.after:
            raise UsageError("perturb compares one model with itself; use it with --endpoint URL alone")
        return [replace(config, label="clean", perturb=False), replace(config, label="perturbed")]
    if config.endpoint and not (config.before or config.after):
        return [config]
    if config.before and config.after and not config.endpoint:
        return [
            replace(config, label="before", endpoint=config.before, model=config.before_model or config.model),
            replace(config, label="after", endpoint=config.after, model=config.after_model or config.model),
        ]
    raise UsageError("use --endpoint URL for one model, --before URL and --after URL for two, or --by null for none")
