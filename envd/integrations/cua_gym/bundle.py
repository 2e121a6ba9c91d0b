"""How a bundle of CUA-Gym is staged, set up and scored in a guest: archives, commands, and the checker.

Everything that the agent must not see passes through the root agent and is readable by root only. `hidden/` and
`setup.sh` are removed before the agent starts. `gt/` and `check.sh` reach the guest only while all processes of the
session are stopped, and are removed before these continue. So a check can ask neither the X server nor the session's
bus.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from cuaenv.results import CommandResult
from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.tasks.archives import archive
from envd.tasks.checkers.base import GuestInspector, LeafChecker
from envd.tasks.fields import Timeout
from envd.tasks.text import CheckOutcome, quote
from envd.tasks.verb_base import SetupBase

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.tasks.guest_setup import GuestSetup

_STAGE_TIMEOUT_S: Final = 60.0
WORKSPACE: Final = "/tmp_workspace"  # noqa: S108 -- a path in guests
#: The environment of `setup.sh`.
ENVIRONMENT: Final[Mapping[str, str]] = {
    "DISPLAY": ":0",
    "XAUTHORITY": "/home/user/.Xauthority",
    "HOME": "/root",
    "UDA_GYM_HARNESS_STATE_DIR": "/root/.uda_gym",
}
#: That of `check.sh`: a program that asked the stopped X server would wait for it.
_CHECK_ENVIRONMENT: Final = {name: ENVIRONMENT[name] for name in ("HOME", "UDA_GYM_HARNESS_STATE_DIR")}

# The agent's user can neither enter nor replace it.
_PRIVATE = "/root/.uda_private"
_SETUP, _CHECK = "setup.sh", "check.sh"
_BASH = ("bash", "-c")
# Every step replaces what an earlier attempt left.
_STAGE = f"mkdir -p {WORKSPACE}/results && tar -xf - -C {WORKSPACE} && chmod -R a+rwX {WORKSPACE}"
_STAGE_HIDDEN = (
    f"umask 077 && rm -rf {_PRIVATE} {WORKSPACE}/.uda_hidden && mkdir -p {_PRIVATE} /root/.uda_gym"
    f" && tar -xf - -C {_PRIVATE} --no-same-owner && chmod -R go= {_PRIVATE}"
    f" && mkdir -p {_PRIVATE}/hidden && mv {_PRIVATE}/hidden {WORKSPACE}/.uda_hidden"
)
# A program that a script starts in the background keeps its output open, and the command would seem never to end.
_RUN = (
    "cd {workspace} && bash {private}/{script} >{private}/out 2>{private}/err </dev/null; code=$?;"
    " tail -c 65536 {private}/out; tail -c 4096 {private}/err >&2; rm -rf {removed}; exit $code"
)
# With the workspace itself closed to the agent's user, nothing in it can be renamed or created next to the truth. Links
# to the truth, to the check or into the kernel's file systems would have the check read what the agent cannot.
_STAGE_TRUTH = f"""umask 077; chown root: {WORKSPACE} && chmod 755 {WORKSPACE} || exit 90
find {WORKSPACE} -xdev -type l -print0 | while IFS= read -r -d '' link; do case $(readlink -m -- "$link") in
{WORKSPACE}/gt | {WORKSPACE}/gt/* | /root/* | /proc/* | /sys/* | /dev/*) rm -f -- "$link" ;; esac; done
rm -rf {_PRIVATE} {WORKSPACE}/gt && mkdir -p {_PRIVATE} && tar -xf - -C {_PRIVATE} --no-same-owner \
&& mkdir -p {_PRIVATE}/gt && mv {_PRIVATE}/gt {WORKSPACE}/gt || exit 90
"""

#: Commands of a setup, each with the parts of the bundle on its standard input.
SETUP_COMMANDS: Final[Sequence[tuple[tuple[str, ...], Sequence[tuple[str, str]]]]] = (
    ((*_BASH, _STAGE), [("exec", ".")]),
    ((*_BASH, _STAGE_HIDDEN), [("hidden", "hidden"), (_SETUP, _SETUP)]),
)
RUN_SETUP: Final = (
    *_BASH,
    _RUN.format(workspace=WORKSPACE, private=_PRIVATE, script=_SETUP, removed=f"{_PRIVATE} {WORKSPACE}/.uda_hidden"),
)
#: Parts of the bundle on the standard input of `RUN_CHECK`.
CHECK_PARTS: Final[Sequence[tuple[str, str]]] = [("gt", "gt"), (_CHECK, _CHECK)]
#: One command, so that the agent's user cannot act between staging and checking.
RUN_CHECK: Final = (
    *_BASH,
    _STAGE_TRUTH
    + _RUN.format(workspace=WORKSPACE, private=_PRIVATE, script=_CHECK, removed=f"{_PRIVATE} {WORKSPACE}/gt"),
)


def judge_check(result: CommandResult) -> CheckOutcome:
    """Return the score that `check.sh` printed: the last JSON object, with `overall_score` in [0, 1].

    Raises:
        GuestError: It failed, or printed no score.
    """
    if result.exit_code:
        raise GuestError(f"check.sh failed with exit code {result.exit_code}: {quote(result.stderr or result.stdout)}")
    for line in reversed(result.stdout.decode(errors="replace").splitlines()):
        if not line.strip().startswith("{"):
            continue
        try:
            found = json.loads(line)
        except ValueError:
            continue
        score = found.get("overall_score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise GuestError(f"check.sh printed no overall_score of 0 to 1: {quote(line)}")
        return CheckOutcome(float(score), quote(line))
    raise GuestError(f"check.sh printed no JSON object with its score: {quote(result.stdout)}")


class CuaGymSetup(SetupBase):
    """Stage a CUA-Gym bundle and run its `setup.sh` as root; nothing hidden stays. Made by the loader of bundles."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})

    kind: Literal["cua_gym"]
    bundle: str
    """Its directory on the host."""
    timeout_s: Timeout = 300.0

    async def perform(self, guest: "GuestSetup") -> None:
        bundle = Path(self.bundle)
        for argv, parts in SETUP_COMMANDS:
            try:
                content = await asyncio.to_thread(archive, bundle, parts)
            except (ValueError, OSError) as error:
                raise GuestError(f"bundle {bundle.name}: {error}") from error
            await guest.run(argv, as_root=True, stdin=content)
        guest.activity = "in setup.sh"
        env = {**ENVIRONMENT, "TASK_ID": bundle.name}
        result = await guest.desktop.run(RUN_SETUP, timeout_s=guest.limit_s, as_root=True, env=env)
        if result.exit_code:
            output = quote(result.stderr or result.stdout)
            raise GuestError(f"bundle {bundle.name}: setup.sh failed with exit code {result.exit_code}: {output}")


class CuaGymCheck(LeafChecker):
    """A bundle's own score. A `check.sh` that fails or prints no score is an error, never 0."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})
    # The bundle's `gt` must not reach the guest before the agent has ended.
    runs_before_start: ClassVar[bool] = False

    kind: Literal["cua_gym"]
    bundle: str
    """Its directory on the host."""
    timeout_s: Timeout = 110.0

    @property
    def subject(self) -> str:
        return Path(self.bundle).name

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        try:
            content = await asyncio.to_thread(archive, Path(self.bundle), CHECK_PARTS)
        except (ValueError, OSError) as error:
            raise GuestError(f"bundle {self.subject}: {error}") from error
        result = await inspector.desktop.run(
            RUN_CHECK,
            timeout_s=self.timeout_s + _STAGE_TIMEOUT_S,
            as_root=True,
            env={**_CHECK_ENVIRONMENT, "TASK_ID": self.subject},
            stdin=content,
        )
        return await inspector.judge(judge_check, result)
