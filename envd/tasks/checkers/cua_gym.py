"""The checker of a CUA-Gym bundle: `check.sh`, which runs as root in the guest after the agent has ended."""

import asyncio
from pathlib import Path
from typing import ClassVar, Literal

from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import LeafChecker
from envd.tasks.checkers.inspector import GuestInspector
from envd.tasks.cua_gym import CHECK_PARTS, ENVIRONMENT, RUN_CHECK, archive, judge_check
from envd.tasks.fields import Timeout
from envd.tasks.text import CheckOutcome

_STAGE_TIMEOUT_S = 60.0


class CuaGymCheck(LeafChecker):
    """A bundle's own score. A `check.sh` that fails or prints no score is an error, never 0."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})

    kind: Literal["cua_gym"]
    bundle: str
    """Its directory on the host."""
    timeout_s: Timeout = 110.0

    @property
    def subject(self) -> str:
        """The bundle's name."""
        return Path(self.bundle).name

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        """See `LeafChecker`."""
        try:
            content = await asyncio.to_thread(archive, Path(self.bundle), CHECK_PARTS)
        except (ValueError, OSError) as error:
            raise GuestError(f"bundle {self.subject}: {error}") from error
        result = await inspector.desktop.run(
            RUN_CHECK,
            timeout_s=self.timeout_s + _STAGE_TIMEOUT_S,
            as_root=True,
            env={**ENVIRONMENT, "TASK_ID": self.subject},
            stdin=content,
        )
        return await inspector.judge(judge_check, result)
