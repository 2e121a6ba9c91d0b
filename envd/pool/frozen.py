"""A machine's state at one instant, with what its forks show before they have run."""

from dataclasses import dataclass

from envd.guest.view import DesktopView
from envd.hypervisor.machine import Snapshot


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FrozenDesktop:
    """A state that machines can be forked from, and what they show then."""

    snapshot: Snapshot
    """Whoever froze it discards it, when nothing more is to be forked from it."""
    view: DesktopView
