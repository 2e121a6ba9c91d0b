"""What goes wrong with a fake machine. Plain data; `machine.py` and `hypervisor.py` make it happen."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How a fake machine misbehaves. The default is a machine that boots at once and never fails."""

    create_delay_s: float = 0.0
    """`Hypervisor.create` takes this long."""
    create_error: str = ""
    """`Hypervisor.create` raises HypervisorError with this text."""
    boot_delay_s: float = 0.0
    """From creation until the desktop is drawn and agent and guestd answer; the screen is black until then."""
    boot_failure: str = ""
    """The machine is lost with this reason at the end of its boot."""
    agent_silent: bool = False
    """The guest agent takes commands and never answers."""
    agent_delay_s: float = 0.0
    """The guest agent answers this late."""
    guestd_hangs: bool = False
    """guestd accepts connections and never answers."""
    guestd_delay_s: float = 0.0
    """guestd answers this late."""
    die_after_commands: int | None = None
    """The machine is lost on the command after this many agent and guestd commands."""
    die_after_inputs: int | None = None
    """The machine is lost on the input event after this many key and pointer events."""
    fork_delay_s: float = 0.0
    """`Hypervisor.fork` takes this long."""
    fork_error: str = ""
    """`Hypervisor.fork` raises HypervisorError with this text."""
    freeze_error: str = ""
    """`Hypervisor.freeze` of the machine raises HypervisorError with this text."""
    capture_delay_s: float = 0.0
    """`Hypervisor.capture` of the machine takes this long; it stands still meanwhile."""
    capture_error: str = ""
    """`Hypervisor.capture` of the machine raises HypervisorError with this text, after that delay."""
    unforkable: str = ""
    """What the machine has that a fork cannot have too: `Hypervisor.capture` raises NotForkable, naming it."""
    animation_interval_s: float = 0.0
    """Part of the screen changes this often, for ever, so that it never settles; 0 for never."""
    destroy_delay_s: float = 0.0
    """`destroy` takes this long."""
