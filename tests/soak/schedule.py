"""Plans which faults are injected when. Pure: all randomness comes from a seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """A kind of fault."""

    #: A machine's QEMU is killed.
    MACHINE_KILLED = "machine_killed"
    #: A machine's QEMU is stopped for some time, so that its guest and its monitor hang.
    MACHINE_STOPPED = "machine_stopped"
    #: guestd is killed inside a guest.
    GUESTD_KILLED = "guestd_killed"
    #: guestd accepts connections and does not respond, for some time.
    GUESTD_SILENT = "guestd_silent"
    #: The guest agent accepts commands and does not respond, for some time.
    AGENT_SILENT = "agent_silent"
    #: The display's connection is cut.
    DISPLAY_CUT = "display_cut"
    #: Machines cannot be forked, for some time.
    FORK_REFUSED = "fork_refused"
    #: Forks are slow, for some time.
    FORK_SLOW = "fork_slow"
    #: A machine's state cannot be captured, for some time.
    CAPTURE_REFUSED = "capture_refused"
    #: Destroying a machine is slow.
    DESTROY_SLOW = "destroy_slow"
    #: A file that the task's checker reads keeps a decoder busy, or expands without end.
    FILE_BOMB = "file_bomb"
    #: The guest agent answers without end, with 23 MiB of JSON, or with half an answer, for some time.
    AGENT_ATTACK = "agent_attack"
    #: guestd answers with large or nested JSON, or without end, for some time.
    GUESTD_ATTACK = "guestd_attack"
    #: The display announces 4096x4096 pixels, or sends floods of rectangles, for some time.
    DISPLAY_ATTACK = "display_attack"
    #: A client's process is killed during a call.
    CLIENT_KILLED = "client_killed"


#: Faults of a guest that attacks the daemon.
HOSTILE_GUESTS = frozenset({Fault.FILE_BOMB, Fault.AGENT_ATTACK, Fault.GUESTD_ATTACK, Fault.DISPLAY_ATTACK})
#: Faults per minute and machine of the pool, on fake machines and on real ones.
FAKE_RATES: Mapping[Fault, float] = {
    Fault.MACHINE_KILLED: 2.0,
    Fault.GUESTD_SILENT: 1.0,
    Fault.AGENT_SILENT: 1.0,
    Fault.DISPLAY_CUT: 1.0,
    Fault.FORK_REFUSED: 0.5,
    Fault.FORK_SLOW: 1.0,
    Fault.CAPTURE_REFUSED: 0.5,
    Fault.DESTROY_SLOW: 1.0,
    Fault.FILE_BOMB: 1.0,
    Fault.AGENT_ATTACK: 0.5,
    Fault.GUESTD_ATTACK: 0.5,
    Fault.DISPLAY_ATTACK: 0.5,
    Fault.CLIENT_KILLED: 1.0,
}
REAL_RATES: Mapping[Fault, float] = {
    Fault.MACHINE_KILLED: 0.7,
    Fault.MACHINE_STOPPED: 0.5,
    Fault.GUESTD_KILLED: 0.3,
    Fault.CLIENT_KILLED: 0.7,
}
#: Shortest and longest duration of the faults that have one, in seconds.
DURATIONS_S: Mapping[Fault, tuple[float, float]] = {
    Fault.MACHINE_STOPPED: (1.0, 30.0),
    Fault.GUESTD_SILENT: (0.5, 8.0),
    Fault.AGENT_SILENT: (0.5, 8.0),
    Fault.AGENT_ATTACK: (0.5, 8.0),
    Fault.GUESTD_ATTACK: (0.5, 8.0),
    Fault.DISPLAY_ATTACK: (0.5, 8.0),
    Fault.FORK_REFUSED: (0.3, 2.0),
    Fault.FORK_SLOW: (1.0, 4.0),
    Fault.CAPTURE_REFUSED: (1.0, 4.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A planned fault."""

    at_s: float
    """Time since the start of the soak."""
    kind: Fault
    length_s: float
    """0 for a fault without duration."""
    pick: float
    """Selects a machine or client; range [0, 1)."""


def plan_faults(
    seed: str, rates: Mapping[Fault, float], *, machine_count: int, duration_s: float
) -> list[PlannedFault]:
    """Return the faults of a soak in order of time, each kind at random times at its mean rate; the same for each seed.

    Args:
        seed: Of all randomness.
        rates: Faults of each kind per minute and machine.
        machine_count: Machines of the pool.
        duration_s: Of the soak. Its last tenth has no faults, so that the effects of all faults are observed.
    """
    planned = []
    for kind, rate in rates.items():
        rng = random.Random(f"{seed}/{kind.value}")
        at_s = 0.0
        while rate > 0:
            at_s += rng.expovariate(rate * machine_count / 60)
            min_s, max_s = DURATIONS_S.get(kind, (0.0, 0.0))
            fault = PlannedFault(at_s=at_s, kind=kind, length_s=rng.uniform(min_s, max_s), pick=rng.random())
            if at_s > 0.9 * duration_s:
                break
            planned.append(fault)
    return sorted(planned, key=lambda fault: fault.at_s)


def pick_one(candidates: Sequence[str], pick: float) -> str | None:
    """Return the candidate that a fault's `pick` selects; None without candidates."""
    return sorted(candidates)[int(pick * len(candidates))] if candidates else None
