"""The setup and the evaluator of an OSWorld task, as data. OSWorld's own code performs them, in a sandboxed process."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.downloads import asset_urls
from envd.tasks.bridge import ForeignObject
from envd.tasks.checkers.base import GuestInspector, LeafChecker
from envd.tasks.fields import AssetRef, Timeout
from envd.tasks.text import CheckOutcome
from envd.tasks.verb_base import SetupBase

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.tasks.guest_setup import GuestSetup

_NOT_INSTALLED = "OSWorld is not installed on this host; run `envd osworld install` and restart the daemon"

Parameters = dict[str, JsonValue]


class OsworldSetup(SetupBase):
    """Perform setup steps in OSWorld's form with OSWorld's own code, which decides what a second run does."""

    kind: Literal["osworld"]
    steps: Annotated[tuple[dict[str, JsonValue], ...], Field(min_length=1)]
    timeout_s: Timeout = 600.0

    @model_validator(mode="after")
    def _names_its_downloads(self) -> Self:
        try:
            asset_urls(self.steps, {})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"steps: a step has a type and parameters, a download has files: {error!r}") from error
        return self

    def downloads(self) -> Iterator[AssetRef]:
        yield from map(AssetRef, asset_urls(self.steps, {}).values())

    async def perform(self, guest: "GuestSetup") -> None:
        def note(step: str) -> None:
            guest.activity = f"in {step}"

        if guest.resources.bridge is None:
            raise GuestError(_NOT_INSTALLED)
        await guest.resources.bridge.set_up(guest.desktop, self.steps, os=guest.os, on_step=note)


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
        """See `LeafChecker`: its `postconfig` acts in the session, which the bridge stops afterwards if it can."""
        return True

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        """Run OSWorld's evaluator in its own process. Raises: GuestError, MachineLost."""
        if inspector.bridge is None:
            raise GuestError(_NOT_INSTALLED)
        return await inspector.bridge.evaluate(inspector.desktop, self.to_osworld(), os=inspector.os)

    def to_osworld(self) -> ForeignObject:
        """Return it in the form of OSWorld's task files."""
        fields = self.model_dump(mode="json", exclude={"kind", "name"})
        return {key: value for key, value in fields.items() if value is not None}
