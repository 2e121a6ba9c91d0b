"""The file with settings of `trainer eval` and `trainer play`. docs/evaluation.md lists its keys."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field, JsonValue

from cuaenv.problems import without_path
from trainer.agent.settings import AgentSettings
from trainer.cli.options import DEFAULT_RUN, DEFAULT_TARGET, read_settings
from trainer.cli.output import UsageError
from trainer.config import STRICT, InputError, parse
from trainer.evaluate.chat import Sampling
from trainer.evaluate.endpoint import read_key
from trainer.evaluate.selection import Selection, SplitName, read_task_ids

KEY_VARIABLE: Final = "TRAINER_API_KEY"
#: Flags with the URL of a model replace all such keys of a file.
_ENDPOINTS: Final = frozenset({"endpoint", "before", "after"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The keys of the file. Flags override them; `trainer play` ignores those of several tasks or models."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    endpoint: str = ""
    """Base URL of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    before: str = ""
    """Base URL of the checkpoint before training; requires `after`."""
    after: str = ""
    """Base URL of the checkpoint after training."""
    perturb: bool = False
    """Whether to evaluate the model at `endpoint` on clean and on perturbed desktops, and compare both."""
    model: str = ""
    """The model's name; empty for the only served one."""
    before_model: str = ""
    """The model's name at `before`."""
    after_model: str = ""
    """The model's name at `after`."""
    checkpoint: Path | None = None
    """Use SGLang's `/generate` with this checkpoint's chat template; URLs are then without `/v1`."""
    label: str = ""
    """Name of the run in tables and files; empty for the model's name."""
    key_variable: str = KEY_VARIABLE
    """Environment variable with the endpoint's API key."""
    key_file: Path | None = None
    """File with the endpoint's API key."""

    envd: str = DEFAULT_TARGET
    """HOST:PORT of the daemon."""
    tls_ca: Path | None = None
    """Certificate of the authority that signed the daemon's; enables TLS."""
    pool: str = ""
    """The daemon's pool; empty for each task's own."""
    run: str = DEFAULT_RUN
    """Label of the episodes at the daemon, for fair share, quotas and metrics."""

    select: Selection = field(default_factory=Selection)
    """The tasks."""
    tasks_file: Path | None = None
    """File with more task ids, one per line."""
    split: SplitName = "all"
    """Side of the split of `trainer data`, over the chosen suites."""
    include_unrunnable: bool = False
    """Whether to include tasks that the daemon's host cannot run."""

    agent: Path | None = None
    """YAML file with the agent's settings, as for training."""
    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Replies per episode; by default the agent's setting."""
    seeds: Annotated[int, Field(ge=1)] = 1
    """Attempts at each task."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    request: Mapping[str, JsonValue] = field(default_factory=dict)
    """Additional fields of each request, such as `top_k = 20`."""
    concurrency: Annotated[int, Field(ge=0)] = 0
    """Concurrent episodes; 0 for the pools' capacity."""

    out: Path | None = None
    """Directory for results, report and replays; by default out/eval or out/play."""
    replays: bool = True
    """Keep each turn's picture."""
    report: bool = True
    """Write an HTML page."""

    def settings(self, **changes: Any) -> AgentSettings:
        """Return the agent's settings, with changes. Raises: UsageError."""
        return read_settings(self.agent, max_turns=self.max_turns, **changes)

    def key(self) -> str:
        """Return the endpoint's API key; empty for none. Raises: InputError."""
        return read_key(variable=self.key_variable, file=self.key_file)

    def sampling(self, settings: AgentSettings) -> Sampling:
        """Return the sampling parameters. Raises: UsageError: They cannot give different attempts."""
        if self.temperature == 0 and self.seeds > 1:
            raise UsageError(f"seeds {self.seeds} with greedy sampling repeats the same attempt; set temperature")
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_reply_tokens=settings.reply_tokens,
            stop=settings.make_grammar().stop,
            more=self.request,
        )

    def selection(self, task_ids: Sequence[str] = ()) -> Selection:
        """Return the selection, or that of the given tasks instead of the file's. Raises: InputError."""
        if not task_ids:
            task_ids = [*self.select.task_ids, *(read_task_ids(self.tasks_file) if self.tasks_file else [])]
        return replace(self.select, task_ids=task_ids)


def read_run(file: Path | None, flags: Mapping[str, object]) -> RunConfig:
    """Return the settings of a file, overridden by flags.

    Args:
        file: The file; None for the defaults.
        flags: By key, such as `model` and `select.limit`; None and empty texts are not given.

    Raises:
        UsageError: A key is unknown, a value is invalid, or the file cannot be read.
    """
    try:
        held: dict[str, Any] = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {without_path(error)}") from error
    # The words of choices, as a file has them.
    given: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None and value != "":
            section, _, name = key.rpartition(".")
            place = given
            if section:
                kept = held.get(section)
                place = given.setdefault(section, dict(kept) if isinstance(kept, dict) else {})
            place[name] = value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
    if _ENDPOINTS & given.keys():
        held = {name: value for name, value in held.items() if name not in _ENDPOINTS}
    try:
        return parse(RunConfig, held | given)
    except InputError as error:
        raise UsageError(str(error) if file is None else f"{file} {error}") from error
