"""Faults of a fake machine, applied by `machine.py` and `hypervisor.py`."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

#: Answers a command of the guest agent, given its name, its arguments and the timeout in seconds.
Agent = Callable[[str, Mapping[str, JsonValue] | None, float], Awaitable[JsonValue]]


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
    starved: bool = False
    """The host gives the guest no processor: nothing that `Machine.examine` asks is answered."""
    monitor_answers: bool = True
    """`Machine.examine` finds a QEMU that answers."""
    agent_delay_s: float = 0.0
    """Delay of the guest agent's responses."""
    agent: Agent | None = None
    """Answers the commands of the guest agent in place of the guest; None for the guest's own."""
    guestd_hangs: bool = False
    """guestd accepts connections and never responds."""
    guestd_delay_s: float = 0.0
    """Delay of guestd's responses."""
    guestd_body: Callable[[], AsyncIterator[bytes]] | None = None
    """Body of guestd's answer to every request, in pieces; None for correct answers."""
    display_update: bytes = b""
    """The display's answer to every request for an update; empty for correct answers."""
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
