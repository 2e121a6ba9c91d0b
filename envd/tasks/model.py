"""A task: an instruction, a setup for its initial state, a checker that scores it, an oracle that solves it.

Frozen data, validated on load, so that a wrong field, verb or checker is rejected before any machine boots. Setup verbs
(`envd.tasks.verbs`) and checkers (`envd.tasks.checkers`) are unions discriminated by `kind`. Guest paths are absolute,
because the same path must mean the same file to the user's session and to the root agent.

A need is a word, such as `powershell`. A task whose need an image does not provide would score 0 whatever the agent
does, so it is refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, PlainValidator, model_validator

from cuaenv.actions import Done, Fail, Tool, ToolAction
from envd.hypervisor.machine import GuestOs
from envd.tasks.checker_union import AnyLeafChecker, Checker, leaves
from envd.tasks.checkers.programs import PoweredOff
from envd.tasks.fields import AssetRef, Model, TaskPerturb
from envd.tasks.oracle import OracleAction, WaitFor, parse_action
from envd.tasks.user import TaskUser
from envd.tasks.verbs import SetupVerb, StartMcpServer

Feature = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,30}$")]
OracleStep = tuple[Annotated[OracleAction, PlainValidator(parse_action)], ...]


Split = Literal["train", "held_out"]


class Task(Model):
    """One task. `Reset` runs `setup`, the agent gets `instruction`, `Evaluate` runs `checker`."""

    task_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*/[a-z0-9][a-z0-9_-]*$", max_length=128)]
    """`{suite}/{name}`."""
    version: Annotated[int, Field(ge=1)] = 1
    """Incremented when a change makes scores incomparable with earlier ones."""
    instruction: Annotated[str, Field(min_length=1)]
    level: Annotated[int, Field(ge=1, le=5)]
    """Difficulty: 1 one action in one place, 2 one short sequence, 3 several, 4 two applications, 5 planning."""
    domain: str = ""
    """Its subject, for reports: `editor`, `files`."""
    split: Split | None = None
    """Whether to train on it; None: its id decides, see `envd.tasks.templates.split_of`."""
    tags: tuple[str, ...] = ()
    os: GuestOs = GuestOs.LINUX
    image: str = ""
    """Name of the required image; empty for any with the right operating system."""
    needs: tuple[Feature, ...] = ()
    """What the image must provide beyond its operating system, such as `powershell`."""
    pool: str = ""
    """Pool to run in if the caller names none; empty for the only one that fits."""
    max_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    tools: tuple[Tool, ...] = ()
    """Tools that the agent may use besides screen, mouse and keyboard; the pool may allow more."""
    user: TaskUser | None = None
    """Whom the agent may ask, with the tool `ask_user`."""
    setup: tuple[SetupVerb, ...] = ()
    perturb: TaskPerturb | None = None
    """Perturbations of its world; None for a clean one."""
    freeze_setup: bool = False
    """Whether to keep the state after `setup` frozen, so that later episodes start there and skip the setup."""
    checker: Checker | None = None
    """None for infeasible tasks only."""
    oracle: tuple[OracleStep, ...] = ()
    """Steps that solve it, each the actions of one `Step` call, and conditions for the next one.

    Coordinates are pixels of a 1280x800 screen.
    """
    infeasible: bool = False
    """Whether the task cannot be done: the agent scores 1 for `Fail`, and 0 otherwise."""

    @property
    def has_start(self) -> bool:
        """Whether something must be done in a guest before an agent gets it."""
        checks = leaves(self.checker) if self.checker else ()
        return bool(self.setup) or any(check.remembers_start for check in checks)

    def downloads(self) -> Iterator[AssetRef]:
        """Yield the files that its setup and its checkers need from the host's cache."""
        parts: tuple[SetupVerb | AnyLeafChecker, ...] = (*self.setup, *(leaves(self.checker) if self.checker else ()))
        for part in parts:
            yield from part.downloads()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.infeasible != (self.checker is None):
            raise ValueError("checker: required, unless the task is infeasible")
        checks = tuple(leaves(self.checker)) if self.checker else ()
        if len(checks) > 1 and any(isinstance(check, PoweredOff) for check in checks):
            raise ValueError("powered_off: nothing else can be checked on a machine that is off; use it alone")
        parts: tuple[SetupVerb | AnyLeafChecker, ...] = (*self.setup, *checks)
        unsupported = [part.kind for part in parts if self.os not in part.systems]
        if unsupported:
            raise ValueError(f"{unsupported[0]}: not supported in {self.os.value} guests")
        if self.perturb and self.os is not GuestOs.LINUX:
            raise ValueError(f"perturb: not supported in {self.os.value} guests")
        if self.freeze_setup and not self.setup:
            raise ValueError("freeze_setup: the task has no setup, so episodes already start from the pool's template")
        if len(self.oracle) > self.max_steps:
            raise ValueError(f"oracle: {len(self.oracle)} steps exceed max_steps {self.max_steps}")
        actions = [action for step in self.oracle for action in step]
        if not all(self.oracle) or any(isinstance(action, Done | Fail) for action in actions[:-1]):
            raise ValueError("oracle: steps must not be empty, and nothing may follow done or fail")
        needed = {action.needs for action in actions if isinstance(action, ToolAction)}
        if needed - set(self.tools):
            raise ValueError(f"oracle: uses the tools {', '.join(sorted(needed))}; list them in tools")
        if ("ask_user" in self.tools) != (self.user is not None):
            raise ValueError("user: required with the tool ask_user, and only then")
        if ("mcp" in self.tools) != bool(self.mcp_servers):
            raise ValueError("tools: mcp is required with start_mcp_server, and only then")
        for step in self.oracle:
            kinds = [isinstance(each, WaitFor) for each in step]
            if kinds != sorted(kinds) or all(kinds):
                raise ValueError("oracle: wait_for follows the actions of its step")
        return self

    @property
    def mcp_servers(self) -> tuple[str, ...]:
        return tuple(verb.name for verb in self.setup if isinstance(verb, StartMcpServer))


class Offer(NamedTuple):
    """The image of a pool."""

    pool: str
    os: GuestOs
    image: str
    provides: frozenset[str]


def missing_needs(task: Task, provides: frozenset[str]) -> str:
    """Return the needs of a task that are not provided, as a list for messages; empty if all are."""
    return ", ".join(need for need in task.needs if need not in provides)


def needs_obstacle(task: Task, offers: Sequence[Offer]) -> str:
    """Return why no pool that could run a task has what it needs, as `kind: detail`.

    Returns an empty string if one has, or if none could run the task in any case: `Reset` reports that.
    """
    fitting = [offer for offer in offers if _fits(task, offer)]
    lacking = [(offer, missing_needs(task, offer.provides)) for offer in fitting]
    if not task.needs or not all(lacks for _, lacks in lacking):
        return ""
    return "; ".join(
        f"needs {lacks}: image {offer.image} of pool {offer.pool} does not provide it" for offer, lacks in lacking
    )


def split_by_needs(tasks: Iterable[Task], provides: frozenset[str]) -> tuple[list[Task], list[Task]]:
    """Return the tasks whose needs are all provided, and the others."""
    tasks = list(tasks)
    return [t for t in tasks if not missing_needs(t, provides)], [t for t in tasks if missing_needs(t, provides)]


def _fits(task: Task, offer: Offer) -> bool:
    return offer.os is task.os and task.image in ("", offer.image) and task.pool in ("", offer.pool)


def allowed_tools(task: Task, of_pool: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Return what the task or the pool allows, each once."""
    return tuple(dict.fromkeys(chain(task.tools, of_pool)))


def offered_tools(task: Task, of_pool: tuple[Tool, ...]) -> tuple[str, ...]:
    """Return what an agent can use: allowed tools, with `mcp:NAME` for each MCP server, and no user where none is."""
    names: list[str] = []
    for tool in allowed_tools(task, of_pool):
        if tool == "mcp":
            names += (f"mcp:{name}" for name in task.mcp_servers)
        elif tool != "ask_user" or task.user is not None:
            names.append(tool)
    return tuple(names)
