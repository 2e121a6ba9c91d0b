"""What all setup verbs share."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from envd.hypervisor.machine import GuestOs
from envd.tasks.fields import AssetRef, Model, Timeout

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.tasks.guest_setup import GuestSetup


class SetupBase(Model, ABC):
    """Common fields of all setup verbs."""

    if TYPE_CHECKING:
        kind: str

    #: Guests that support the verb. A task for another system is rejected before any machine boots.
    systems: ClassVar[frozenset[GuestOs]] = frozenset(GuestOs)

    # The first start of a program takes up to a minute in an emulated guest on a busy host.
    timeout_s: Timeout = 180.0
    """Seconds after which the verb, and with it the reset, fails."""

    def downloads(self) -> Iterator[AssetRef]:
        """Yield the files that it needs from the host's cache."""
        yield from ()

    @abstractmethod
    async def perform(self, guest: "GuestSetup") -> None:
        """Do it, and wait for its effect. The caller limits the time.

        Raises: GuestError, GuestUnresponsive, MachineLost.
        """


class SessionVerb(SetupBase):
    """A verb that needs the windows of a user session, and so a guest with guestd."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})
