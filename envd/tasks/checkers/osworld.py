"""The evaluator of an OSWorld task, as data. OSWorld's own code scores it, in a sandboxed process."""

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import JsonValue, model_validator

from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import GuestInspector, LeafChecker
from envd.tasks.fields import AssetRef
from envd.tasks.osworld import NOT_INSTALLED, OsworldObject, asset_urls
from envd.tasks.text import CheckOutcome

Parameters = dict[str, JsonValue]


class OsworldEvaluator(LeafChecker):
    """OSWorld's metrics, and what they compare."""

    # Its `postconfig` may change the guest.
    runs_before_start: ClassVar[bool] = False

    kind: Literal["osworld"]
    func: str | tuple[str, ...]
    """Names of metrics."""
    conj: Literal["and", "or"] = "and"
    result: Parameters | tuple[Parameters, ...] | None = None
    """What to get from the guest; with several metrics, one for each."""
    expected: Parameters | tuple[Parameters | None, ...] | None = None
    options: Parameters | tuple[Parameters | None, ...] | None = None
    postconfig: tuple[Parameters, ...] = ()
    """Setup steps in OSWorld's form, performed before the evaluation."""

    @model_validator(mode="after")
    def _names_its_downloads(self) -> Self:
        try:
            asset_urls((), self.to_osworld())
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"malformed postconfig, result or expected: {error!r}") from error
        return self

    @property
    def subject(self) -> str:
        return self.func if isinstance(self.func, str) else f" {self.conj} ".join(self.func)

    def downloads(self) -> Iterator[AssetRef]:
        """Yield the files that OSWorld would download to score it."""
        yield from map(AssetRef, asset_urls((), self.to_osworld()).values())

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- in each
        """See `LeafChecker`: its `postconfig` acts in the session, and its getters ask it."""
        return True

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        """Run OSWorld's evaluator in its own process. Raises: GuestError, MachineLost."""
        if inspector.osworld is None:
            raise GuestError(NOT_INSTALLED)
        return await inspector.osworld.evaluate(inspector.desktop, self.to_osworld(), os=inspector.os)

    def to_osworld(self) -> OsworldObject:
        """Return it in the form of OSWorld's task files."""
        fields = self.model_dump(mode="json", exclude={"kind", "name"})
        return {key: value for key, value in fields.items() if value is not None}
