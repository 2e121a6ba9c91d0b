"""Faults of a fake machine: plain data, applied by `machine.py` and `hypervisor.py`."""

from dataclasses import dataclass
from typing import Literal

#: How a hostile guest agent answers: bytes without end, 23 MiB of empty lists, or half an answer.
AgentAttack = Literal["", "endless", "large", "half"]
#: How a hostile guestd answers: 12 MiB of empty lists, 200,000 nested lists, or one byte at a time without end.
GuestdAttack = Literal["", "large", "nested", "slow"]
#: How a hostile display answers a request: a screen of 4096x4096, or 65,535 rectangles.
DisplayAttack = Literal["", "size", "flood"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Injected faults. By default a machine boots at once and never fails."""

    create_delay_s: float = 0.0
    """Duration of `Hypervisor.create`."""
    create_error: str = ""
    """`Hypervisor.create` raises HypervisorError with this text."""
    boot_delay_s: float = 0.0
    """Time from creation until the desktop is drawn and agent and guestd respond; the screen is black until then."""
    boot_failure: str = ""
    """The machine is lost with this reason at the end of its boot; empty for never."""
    agent_silent: bool = False
    """The guest agent accepts commands and never responds."""
    agent_delay_s: float = 0.0
    """Delay of the guest agent's responses."""
    agent_attack: AgentAttack = ""
    """How the guest agent answers instead of executing commands; empty if it executes them."""
    guestd_hangs: bool = False
    """guestd accepts connections and never responds."""
    guestd_delay_s: float = 0.0
    """Delay of guestd's responses."""
    guestd_attack: GuestdAttack = ""
    """How guestd answers every request; empty for correct answers."""
    display_attack: DisplayAttack = ""
    """How the display answers every request for an update; empty for correct answers."""
    die_after_commands: int | None = None
    """The machine is lost at the command that follows this many agent and guestd commands."""
    die_after_inputs: int | None = None
    """The machine is lost at the input event that follows this many key and pointer events."""
    reaction_s: float = 0.0
    """Programs react to each input event after up to this long, in order. A fork has none that are still due."""
    fork_delay_s: float = 0.0
    """Duration of `Hypervisor.fork`."""
    fork_error: str = ""
    """`Hypervisor.fork` raises HypervisorError with this text."""
    freeze_error: str = ""
    """`Hypervisor.freeze` of the machine raises HypervisorError with this text."""
    capture_delay_s: float = 0.0
    """Duration of `Hypervisor.capture` of the machine, which is paused for that time."""
    capture_error: str = ""
    """`Hypervisor.capture` of the machine raises HypervisorError with this text, after that delay."""
    unforkable: str = ""
    """Name of a device that forks cannot share: `Hypervisor.capture` raises NotForkable with it; empty for none."""
    animation_interval_s: float = 0.0
    """Period at which part of the screen changes, so that it never settles; 0 for no changes."""
    destroy_delay_s: float = 0.0
    """Duration of `destroy`."""
