"""Messages between the soak and its clients, and the keys of calls' outcomes. Plain data."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

#: Key of a successful call. The key of a failed call is `CODE/REASON`, or `CODE` without a reason.
OK = "OK"
#: Key of a successful call with a wrong response.
WRONG_RESPONSE = "WRONG_RESPONSE"
REUSED = "INVALID_ARGUMENT/REQUEST_ID_REUSED"
MISMATCH = "ABORTED/STEP_INDEX_MISMATCH"
ENDED = "FAILED_PRECONDITION/EPISODE_ENDED"
GONE = "NOT_FOUND/EPISODE_NOT_FOUND"
NO_FILE = "NOT_FOUND/NOT_FOUND"
STALE = "ABORTED/STALE_EPOCH"
STORE_FULL = "FAILED_PRECONDITION/CHECKPOINT_STORE_FULL"
NO_CHECKPOINT = "NOT_FOUND/CHECKPOINT_NOT_FOUND"
TIMED_OUT = "DEADLINE_EXCEEDED"
CANCELLED = "CANCELLED"


def is_voiding(call: str, key: str) -> bool:
    """Whether a call's outcome voids its episode. Failed observations and guest access do not."""
    return key in {"DATA_LOSS/MACHINE_LOST", "DATA_LOSS/LOSS_UNDECIDED"} or (
        call in {"step", "fork"} and key.startswith("DATA_LOSS/")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A request without an outcome yet."""

    call: str
    """`reset`, `step`, `fork`, `checkpoint` or `rollback`."""
    request_id: str
    step_index: int = 0
    """Steps of the episode before it; of a rollback and of a reset to a checkpoint, those of the checkpoint."""
    count: int = 1
    """Episodes of a reset, children of a fork, clicks of a step."""
    epoch: int = 0
    """The episode's; 0 if unknown."""
    checkpoint_id: str = ""
    """Checkpoint of a rollback, or of a reset that starts there."""
    performed_count: int = 0
    """Clicks performed before that checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """An episode that a killed client left, with its last known state."""

    episode_id: str
    step_count: int
    performed_count: int
    """Clicks reported as performed, including those of the episodes that it was forked from."""
    last_contact_s: float
    """Its client's last contact, on the host's monotonic clock."""
    pending: Pending | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """The work of one client."""

    address: str
    seed: str
    task_id: str
    pool: str
    counter_path: str
    """Guest file with the number of clicks that the guest has received."""
    click_px: tuple[int, int]
    """Position of the button that counts."""
    target: int
    """The count for which the task scores 1; every other count scores 0."""
    max_group: int
    lease_ttl_s: int
    timeout_s: float
    """Timeout of a call; a quarter of it for the guest to count."""
    evaluate_timeout_s: float
    """Timeout of an evaluation: longer than judging a hostile file takes."""
    opening_timeout_s: float
    """How long a group or a branch may wait for machines."""
    quiet_s: float
    """How long the screen must not change after a step."""
    early_s: float
    """Upper bound of deadlines and cancellations that are deliberately too early."""
    guest_run_s: float
    """How long the guest runs between two reads of its counter; 0 if it needs no time."""
    reads_tree: bool = False
    """Whether some observations include the accessibility tree, which guestd reads."""
    max_clicks: int = 3
    """Most clicks of one step."""
    orphans: Sequence[Orphan] = ()
    resets: Sequence[Pending] = ()
    """Resets of a killed client that had no outcome."""

    @classmethod
    def from_json(cls, text: str) -> "SoakPlan":
        """Parse the result of `as_line`."""
        raw = json.loads(text)
        orphans = [
            Orphan(**{**o, "pending": Pending(**o["pending"]) if o["pending"] else None}) for o in raw["orphans"]
        ]
        resets = [Pending(**reset) for reset in raw["resets"]]
        return cls(**{**raw, "orphans": orphans, "resets": resets, "click_px": tuple(raw["click_px"])})

    def as_line(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"
