"""How a task of OpenComputer is set up and scored in a guest: by its own code, which runs there.

The parts of the repository that a step needs reach the guest when the step begins and are removed when it ends. The
verifiers and the expected values arrive after the agent has ended and its processes are stopped, in a directory that
its user cannot enter, and run as root. The programs that ran when the setup ended, such as the task's application,
are left running: verifiers ask them for their state.
"""

import asyncio
import builtins
import json
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, JsonValue, model_validator

from cuaenv.results import CommandResult
from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.tasks.archives import archive
from envd.tasks.checkers.base import GuestInspector, LeafChecker
from envd.tasks.fields import Model, Timeout
from envd.tasks.text import CheckOutcome, CheckResult, quote
from envd.tasks.verb_base import SetupBase

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.tasks.guest_setup import GuestSetup

#: Shorter words, such as numbers of pages, occur everywhere.
_TELLING_CHARS: Final = 2
_STAGE_TIMEOUT_S: Final = 60.0
#: Directories of the repository.
TASKS, VERIFIERS = "task_generator/tasks", "verifiers"
#: The code that sets up and saves.
COMMON = ("evaluation/apps", "evaluation/runtime", "computer_env/backends/base.py")
_DRIVER = "driver.py"

_STAGED = "/tmp/.opencomputer"  # noqa: S108 -- a path in guests
_PRIVATE = "/root/.opencomputer"
_STAGE = f"rm -rf {_STAGED} && mkdir {_STAGED} && tar -xf - -C {_STAGED} --no-same-owner && chown -R user: {_STAGED}"
_SET_UP = f"cd && exec python3 {_STAGED}/{_DRIVER} setup"
#: A file in guests: the programs of the user that a check needs, one a line. They are not stopped.
_KEPT_PROGRAMS: Final = "/root/.envd-kept-programs"
#: Stops the agent's processes, by their program: a stopped process cannot start another one, so the loop ends. A check
# may ask the X server and the session bus. Rounds are bounded: a check is not to wait for a fork bomb.
_STOP_AGENT: Final = f"""for round in $(seq 50); do left=
for process in $(pgrep -U user -r R,S,D,I); do program=$(readlink /proc/$process/exe); case $program in
/usr/lib/xorg/Xorg | /usr/bin/dbus-daemon | '') ;;
*) grep -qxsF -- "$program" {_KEPT_PROGRAMS} || {{ kill -STOP $process 2>/dev/null && left=1; }} ;; esac; done
[ -n "$left" ] || break; sleep 0.05; done
"""
# Interpreters are not kept: they run what the agent writes.
_FINISH = f"""umask 077; rm -rf {_STAGED} /tmp/create_env.py
for process in $(pgrep -U user); do readlink /proc/$process/exe; done | sort -u |
grep -vE '/(python[0-9.]*|perl[0-9.]*|(ba|da)?sh|env|xterm|lxterminal)$' > {_KEPT_PROGRAMS} || true
"""
_CHECK = f"""{_STOP_AGENT}umask 077; rm -rf {_PRIVATE}
mkdir {_PRIVATE} && tar -xf - -C {_PRIVATE} --no-same-owner || exit 90
cd / && python3 -I {_PRIVATE}/{_DRIVER} check; code=$?; rm -rf {_PRIVATE}; exit $code
"""
#: Of the user's session, for verifiers that ask its programs; but not the user's code for Blender and FreeCAD.
_ENVIRONMENT: Final[Mapping[str, str]] = {
    "DISPLAY": ":0",
    "XAUTHORITY": "/home/user/.Xauthority",
    "HOME": "/home/user",
    "XDG_RUNTIME_DIR": "/run/user/1000",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus",
    "BLENDER_USER_CONFIG": f"{_PRIVATE}/blender",
    "BLENDER_USER_SCRIPTS": f"{_PRIVATE}/blender",
    "FREECAD_USER_HOME": f"{_PRIVATE}/freecad",
}


class VerifierCheck(Model):
    """One check of a task: a command of its application's verifier, and what it must print."""

    command: str
    description: str = ""
    key: str = ""
    """A key of the printed JSON object, whose value must be `expected`."""
    expected: JsonValue = None
    eval: str = ""
    """Instead of `key`: a Python expression over `result`, the printed JSON."""

    @model_validator(mode="after")
    def _says_what_is_right(self) -> Self:
        if not self.key and not self.eval:
            raise ValueError("give key or eval")
        if self.eval:
            try:
                compile(self.eval, "eval", "eval")
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"eval is not a Python expression: {error}") from error
        return self


def parts(task: str, app: str, *, with_verifier: bool) -> list[tuple[str, str]]:
    """Return the parts of the repository that a step needs, each with its name in an archive."""
    own = f"{VERIFIERS}/{app}/{app}.py" if with_verifier else f"{TASKS}/{task}/env"
    return [(part, part) for part in (*COMMON, own)]


async def _content(root: Path, named: Sequence[tuple[str, str]], request: Mapping[str, object]) -> bytes:
    driver = (files("envd.integrations.open_computer") / "driver.py").read_bytes()
    extra = {_DRIVER: driver, "request.json": json.dumps(request).encode()}
    try:
        return await asyncio.to_thread(archive, root, named, extra=extra)
    except (ValueError, OSError, tarfile.TarError) as error:
        raise GuestError(f"{root}: {error}") from error


def _definition(root: Path, task: str) -> dict[str, Any]:
    """Return a task's definition without its checks. Raises: GuestError."""
    try:
        content = json.loads((root / TASKS / task / "task.json").read_bytes())
        return {"id": task, "app": content["app"], "env": content["env"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GuestError(f"task {task}: task.json cannot be read: {error!r}") from error


def judge_checks(result: CommandResult, checks: Sequence[VerifierCheck]) -> CheckOutcome:
    """Return the share of checks that passed.

    Raises:
        GuestError: A command did not end, or printed no JSON.
    """
    if result.exit_code:
        raise GuestError(f"the checks failed with exit code {result.exit_code}: {quote(result.stderr[-500:])}")
    try:
        outputs = json.loads(result.stdout)
        judged = [_judge(check, outputs[check.command]) for check in checks]
    except (ValueError, KeyError, TypeError) as error:
        raise GuestError(f"malformed output of the checks: {error!r}: {quote(result.stdout)}") from error
    passed = sum(part.score for part in judged)
    return CheckOutcome(passed / len(judged), f"{passed:g} of {len(judged)} checks passed", tuple(judged))


def _judge(check: VerifierCheck, output: Mapping[str, Any]) -> CheckResult:
    if output["exit_code"] is None:
        raise GuestError(f"verifier {check.command}: did not end in time")
    try:
        found = json.loads(output["stdout"])
    except ValueError:
        code, stderr = output["exit_code"], quote(output["stderr"])
        raise GuestError(f"verifier {check.command}: printed no JSON, exit code {code}: {stderr}") from None
    problem = ""
    if check.eval:
        passed, problem = _evaluates(check.eval, found)
    elif isinstance(found, dict):
        passed = found.get(check.key) == check.expected
    else:
        raise GuestError(f"verifier {check.command}: printed no object: {quote(output['stdout'])}")
    name = check.description or check.command
    evidence = f"{problem}{check.command}: {quote(json.dumps(found))}"
    return CheckResult(name=name, score=float(passed), evidence=evidence)


def _evaluates(expression: str, found: object) -> tuple[bool, str]:
    """Return the truth of an expression, and why it has none: False, as in OpenComputer.

    Only called in a sandboxed worker.
    """
    try:
        return bool(eval(expression, {"__builtins__": builtins, "result": found})), ""  # noqa: S307
    except NameError as error:
        raise GuestError(f"eval {expression}: {error}") from error
    except Exception as error:
        return False, f"{error!r}; "


class OpenComputerSetup(SetupBase):
    """Set up a task of OpenComputer by its own code, and wait for its application. Made by the loader of its tasks."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})

    kind: Literal["opencomputer"]
    root: str
    """The repository on the host."""
    task: str

    async def perform(self, guest: "GuestSetup") -> None:
        root, desktop, limit_s = Path(self.root), guest.desktop, guest.limit_s
        definition = _definition(root, self.task)
        request = {"task": definition, "screen": desktop.screen_size, "timeout_s": limit_s - _STAGE_TIMEOUT_S}
        content = await _content(root, parts(self.task, str(definition["app"]), with_verifier=False), request)
        for script, as_root, stdin in ((_STAGE, True, content), (_SET_UP, False, b""), (_FINISH, True, b"")):
            result = await desktop.run(("bash", "-c", script), timeout_s=limit_s, as_root=as_root, stdin=stdin)
            if result.exit_code:
                output = (result.stderr or result.stdout)[-500:].decode(errors="replace").strip()
                raise GuestError(f"task {self.task}: {output}")


class OpenComputerCheck(LeafChecker):
    """The share of a task's checks that pass. A verifier that crashes or hangs is an error, never 0."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})
    # The verifiers must not reach the guest before the agent has ended.
    runs_before_start: ClassVar[bool] = False

    kind: Literal["opencomputer"]
    root: str
    """The repository on the host."""
    task: str
    app: str
    checks: Annotated[tuple[VerifierCheck, ...], Field(min_length=1)]
    timeout_s: Timeout = 600.0

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- in each
        """See `LeafChecker`: verifiers ask programs of the session. Its own script stops the agent's others."""
        return True

    @property
    def subject(self) -> str:
        """The task's name."""
        return self.task

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        """See `LeafChecker`."""
        request = {"task": {"id": self.task, "app": self.app}, "commands": list(self._commands())}
        content = await _content(Path(self.root), parts(self.task, self.app, with_verifier=True), request)
        result = await inspector.desktop.run(
            ("bash", "-c", _CHECK), timeout_s=self.timeout_s, as_root=True, env=_ENVIRONMENT, stdin=content
        )
        return await inspector.judge(judge_checks, result, self.checks)

    def paths(self) -> Iterator[str]:
        """Yield the guest's files that its commands name."""
        yield from (word for word in self._words() if word.startswith("/"))

    def values(self) -> Iterator[str]:
        """Yield the other words of its commands, such as expected texts, that are long enough to say something."""
        yield from (word for word in self._words() if not word.startswith("/") and len(word) >= _TELLING_CHARS)

    def _words(self) -> Iterator[str]:
        for command in self._commands():
            yield from shlex.split(command)[1:]

    def _commands(self) -> Iterator[str]:
        """Yield each command once: a verifier only reads."""
        yield from dict.fromkeys(check.command for check in self.checks)
