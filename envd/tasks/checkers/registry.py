"""The checker of the Windows registry."""

import json
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from envd.base.errors import GuestError
from envd.guest.powershell import Script, powershell
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import LeafChecker
from envd.tasks.checkers.inspector import GuestInspector
from envd.tasks.text import CheckOutcome, quote
from envd.tasks.values import MISSING, Missing, ValueExpectation, judge_value


class Registry(LeafChecker, ValueExpectation):
    """A value of the registry."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.WINDOWS})

    kind: Literal["registry"]
    key: Annotated[str, Field(pattern=r"^HKEY_(CURRENT_USER|LOCAL_MACHINE|CLASSES_ROOT|USERS)\\[^\x00]+$")]
    """Such as `HKEY_CURRENT_USER\\Control Panel\\Desktop`; the current user is the one who is logged in."""
    value: str = ""
    """Its name; empty for the key's default value."""

    @property
    def subject(self) -> str:
        """The key and the value's name."""
        return f"{self.key}\\{self.value}" if self.value else self.key

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        """See `LeafChecker`."""
        hive, _, key = self.key.partition("\\")
        result = await inspector.query(powershell(Script.QUERY_REGISTRY, hive=hive, key=key, name=self.value))
        return judge_value(parse_response(result.stdout), self)


def parse_response(stdout: bytes) -> JsonValue | Missing:
    """Return the value that the query found. Raises: GuestError: The response is malformed."""
    try:
        response = json.loads(stdout)
        found, value = response["found"], response["value"]
    except (ValueError, TypeError, KeyError) as error:
        raise GuestError(f"registry query: malformed response from the guest: {quote(stdout)}") from error
    return value if found is True else MISSING
