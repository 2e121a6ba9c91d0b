"""Accounting of a soak: requests, responses, the guests' counters, and the faults that explain errors. Pure.

The guest's own counter decides how many actions were performed; the daemon's records are not trusted. The events of one
client arrive in order. Errors are judged at the end, when all faults are known.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.messages import CANCELLED, OK, TIMED_OUT, Orphan, Pending, is_voiding
from tests.soak.schedule import HOSTILE_GUESTS, Fault

#: How long after the end of a fault the affected calls may still fail.
_AFTERMATH_S = 15.0
#: How long the daemon may wait for a guest that does not respond.
_HANG_S = 150.0
_OPENING = frozenset({"reset", "fork"})
#: These copy the state of a machine, or make a machine of a state.
_COPYING = _OPENING | {"checkpoint", "rollback"}
#: Faults that a fork inherits: the guest itself is damaged, or has processed its input late.
_INHERITED = frozenset({Fault.GUESTD_KILLED, Fault.MACHINE_STOPPED, Fault.FILE_BOMB})


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected."""

    kind: Fault
    machine_id: str
    """Empty if it affects all machines created during it."""
    begin_s: float
    """Time on the host's monotonic clock."""
    end_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A call that did not simply succeed."""

    call: str
    episode_id: str
    sent_s: float
    end_s: float
    key: str
    """`CODE/REASON`, `OK` if it should have been refused, or `WRONG_RESPONSE`."""
    text: str
    allowed: tuple[str, ...]
    """Keys that the client's own behaviour explains."""

    def __str__(self) -> str:
        wanted = f", expected {' or '.join(self.allowed)}" if self.key == OK else ""
        return f"{self.call} of {self.episode_id or 'no episode'}: {self.key}{wanted}: {self.text}"


def faults_of(
    faults: Iterable[InjectedFault], lineage: Sequence[str], *, by_s: float, former: Collection[str] = ()
) -> list[InjectedFault]:
    """Return the faults of a machine until a time: its own, and those inherited from the guests of its ancestors.

    Args:
        faults: All faults.
        lineage: The machine and its ancestors, youngest first.
        by_s: On the host's monotonic clock.
        former: Other machines that the episode had.
    """
    return [
        fault
        for fault in faults
        if fault.begin_s <= by_s
        and (
            fault.machine_id in former
            or (fault.machine_id in lineage and (fault.machine_id == lineage[0] or fault.kind in _INHERITED))
        )
    ]


def is_explained(
    status: Status,
    faults: Iterable[InjectedFault],
    *,
    lineage: Sequence[str],
    runs_guests: bool,
    former: Collection[str] = (),
) -> bool:
    """Return whether the service's contract explains a call's outcome, given the injected faults.

    Args:
        status: The call.
        faults: All faults.
        lineage: The machine of the call's episode and its ancestors; empty if there is none.
        runs_guests: Whether guests run. They can have state that cannot be forked.
        former: Other machines that the episode had.
    """
    if status.key in status.allowed:
        return True
    begun = [fault for fault in faults if fault.begin_s <= status.end_s]
    own = faults_of(begun, lineage, by_s=status.end_s, former=former)
    # Hostile files affect the evaluation of their own episode alone.
    damaging = [fault for fault in own if fault.kind is not Fault.FILE_BOMB]
    # A hostile guest must not affect other machines.
    concurrent = [
        fault for fault in begun if fault.kind not in HOSTILE_GUESTS and fault.end_s + _AFTERMATH_S >= status.sent_s
    ]
    copies = status.call in _COPYING
    code, _, reason = status.key.partition("/")
    match code, reason:
        case "DATA_LOSS", "MACHINE_LOST" | "LOSS_UNDECIDED" | "GUEST_UNRESPONSIVE" | "GUEST_ERROR":
            return bool(damaging) or (copies and bool(concurrent))
        case "RESOURCE_EXHAUSTED", "POOL_EXHAUSTED":
            return status.call in _OPENING
        case "INTERNAL", "SETUP_FAILED" | "HYPERVISOR_ERROR":
            return copies and bool(concurrent)
        case "INTERNAL", "EVALUATOR_FAILED":
            return status.call == "evaluate" and bool(own)
        case "FAILED_PRECONDITION", "NOT_FORKABLE":
            return status.call in ("fork", "checkpoint") and (runs_guests or bool(concurrent))
        case "FAILED_PRECONDITION", "GUEST_REFUSED" | "GUEST_ENDED":
            return bool(damaging)
        case (code, "") if code in {TIMED_OUT, CANCELLED}:
            # A hanging guest delays its callers beyond their deadlines. The daemon waits for its response as long as
            # for a task's checkers, and calls queue behind that.
            return any(fault.end_s + _HANG_S >= status.sent_s for fault in own) or (copies and bool(concurrent))
    return False


@dataclass(slots=True, eq=False, kw_only=True)
class EpisodeAccount:
    """The account of one episode."""

    episode_id: str
    client: int
    performed_count: int
    step_count: int
    last_contact_s: float
    lineage: tuple[str, ...] = ()
    """Its machine and the ancestors of the machine, youngest first."""
    former: tuple[str, ...] = ()
    """Other machines that it had: before rollbacks, and since one whose response is late."""
    pending: dict[str, Pending] = field(default_factory=dict)
    """Requests without an outcome, by id."""
    unknown_count: int = 0
    """Clicks in failed steps, which may have been performed or not."""
    is_over: bool = False
    is_void: bool = False
    is_scored: bool = False
    is_evaluating: bool = False
    """Its client has requested a score, after which it only closes the episode."""
    unreported_count: int = 0
    """Evaluations whose client was killed before it could report the score, which may exist."""

    @property
    def max_count(self) -> int:
        """The largest correct value of the guest's counter."""
        steps = sum(pending.count for pending in self.pending.values() if pending.call == "step")
        return self.performed_count + self.unknown_count + steps


class Accounting:
    """The account of one soak."""

    def __init__(self, *, target: int, runs_guests: bool, machine_of: Callable[[str], str]) -> None:
        """Create an empty account.

        Args:
            target: The count that scores 1.
            runs_guests: Whether guests run.
            machine_of: Returns the id of an episode's machine; empty if it has none now.
        """
        self._target = target
        self._runs_guests = runs_guests
        self._machine_of = machine_of
        self.episodes: dict[str, EpisodeAccount] = {}
        self.faults: list[InjectedFault] = []
        self._resets: dict[str, tuple[int, Pending]] = {}
        self._stored: dict[str, tuple[str, ...]] = {}
        """Lineage of the machine of each checkpoint."""
        self._statuses: list[Status] = []
        self.step_count = 0
        self.fork_count = 0
        self.rollback_count = 0
        self.client_kill_count = 0
        self.duplicated_count = 0
        self.lost_count = 0
        self.stalled_count = 0
        """Clicks missed by guests whose QEMU was stopped. Input sent during the stop reaches the guest all at once, and
        libinput treats clicks without a pause between them as one bouncing contact."""
        self.counted_count = 0
        """Episodes whose final counter was compared with the responses."""
        self.scored_count = 0
        self.fake_rewards: list[str] = []
        self.problems: list[str] = []
        """Wrong counters, as text."""

    def note(self, client: int, event: Mapping[str, Any]) -> None:
        """Process an event of a client."""
        account = self.episodes.get(event.get("episode", ""))
        match event["event"]:
            case "opened":
                self._note_opened(client, event)
            case "sent":
                self._note_sent(client, account, Pending(**event["pending"]))
            case "ended":
                self._note_ended(account, event)
            case "stored" if account is not None:
                self._stored[event["checkpoint"]] = account.lineage
            case "rolled_back" if account is not None:
                self._note_rolled_back(account, event)
            case "counted" if account is not None:
                self._note_counted(account, int(event["count"]), settled=bool(event["settled"]))
            case "scored" if account is not None:
                self._note_scored(account, float(event["score"]), sent_s=float(event["sent_s"]))
            case "closing" | "abandoned" if account is not None:
                account.is_over = True
            case "evaluating" | "evaluated" if account is not None:
                account.is_evaluating = True
                account.unreported_count += 1 if event["event"] == "evaluating" else -1
            case "status":
                self._note_status(account, event)
        if account is not None and event["event"] != "status":
            account.last_contact_s = float(event["at_s"])

    def note_machine(self, machine_id: str) -> None:
        """Note whose machine one is now: the response to a rollback may be late."""
        for account in self.episodes.values():
            if machine_id and self._machine_of(account.episode_id) == machine_id:
                account.former += (machine_id,)

    def client_died(self, client: int) -> tuple[list[Orphan], list[Pending]]:
        """Process the death of a client; return its episodes and resets, for other clients to continue."""
        self.client_kill_count += 1
        orphans = []
        for account in self.episodes.values():
            if account.client != client or account.is_over:
                continue
            if account.is_evaluating:
                account.is_over = True  # it cannot be continued; its lease expires
            else:
                orphans.append(
                    Orphan(
                        episode_id=account.episode_id,
                        step_count=account.step_count,
                        performed_count=account.performed_count,
                        last_contact_s=account.last_contact_s,
                        pending=next(iter(account.pending.values()), None),
                    )
                )
        left = {request_id: reset for request_id, (owner, reset) in self._resets.items() if owner == client}
        for request_id in left:
            del self._resets[request_id]
        return orphans, list(left.values())

    def assign(self, orphans: Iterable[Orphan], client: int | None) -> None:
        """Assign episodes to a client; with None their leases expire."""
        for orphan in orphans:
            account = self.episodes[orphan.episode_id]
            if client is None:
                account.is_over = True
            else:
                account.client = client

    def is_in_call(self, client: int) -> bool:
        """Whether a client waits for the response to a request that another client would have to finish."""
        return any(owner == client for owner, _ in self._resets.values()) or any(
            account.pending for account in self.episodes.values() if account.client == client
        )

    def unexplained(self) -> list[str]:
        """Return the calls whose outcome neither their client's behaviour nor a fault explains, as text."""
        found = []
        for status in self._statuses:
            account = self.episodes.get(status.episode_id)
            lineage = () if account is None else account.lineage
            former = () if account is None else account.former
            if not is_explained(status, self.faults, lineage=lineage, runs_guests=self._runs_guests, former=former):
                found.append(str(status) + ("" if account is None else self._faults_text(account)))
        return found

    def fault_counts(self) -> dict[str, int]:
        """Return the number of faults by kind."""
        return dict(sorted(Counter(fault.kind.value for fault in self.faults).items()))

    @property
    def checkpoint_count(self) -> int:
        """Number of checkpoints that clients stored."""
        return len(self._stored)

    @property
    def hostile_count(self) -> int:
        """Number of faults by which a guest attacked the daemon."""
        return sum(fault.kind in HOSTILE_GUESTS for fault in self.faults)

    def error_counts(self) -> dict[str, int]:
        """Return the number of outcomes other than plain successes, by call and key."""
        return dict(sorted(Counter(f"{status.call} {status.key}" for status in self._statuses).items()))

    # -- events ------------------------------------------------------------------------------------------------------

    def _note_opened(self, client: int, event: Mapping[str, Any]) -> None:
        episode_id = event["episode"]
        self.fork_count += bool(event["parent"])
        parent = self.episodes.get(event["parent"])
        self.episodes[episode_id] = EpisodeAccount(
            episode_id=episode_id,
            client=client,
            performed_count=int(event["performed"]),
            step_count=int(event["step_count"]),
            last_contact_s=float(event["at_s"]),
            lineage=(
                self._machine_of(episode_id),
                *(parent.lineage if parent else self._stored.get(event.get("checkpoint", ""), ())),
            ),
        )

    def _note_sent(self, client: int, account: EpisodeAccount | None, pending: Pending) -> None:
        if pending.call == "reset":
            self._resets[pending.request_id] = (client, pending)
        elif account is not None:
            account.pending[pending.request_id] = pending

    def _note_ended(self, account: EpisodeAccount | None, event: Mapping[str, Any]) -> None:
        self._resets.pop(event["id"], None)
        pending = None if account is None else account.pending.pop(event["id"], None)
        if account is None or pending is None or pending.call != "step":
            return
        if event["performed"] is None:
            account.unknown_count += pending.count
            return
        self.step_count += 1
        account.performed_count += int(event["performed"])
        account.step_count = pending.step_index + 1

    def _note_rolled_back(self, account: EpisodeAccount, event: Mapping[str, Any]) -> None:
        pending = account.pending.pop(event["id"])
        self.rollback_count += 1
        account.former += account.lineage[:1]
        ancestors = self._stored.get(pending.checkpoint_id, account.lineage)
        account.lineage = (self._machine_of(account.episode_id), *ancestors)
        account.performed_count, account.step_count = pending.performed_count, pending.step_index
        account.unknown_count, account.is_scored = 0, False

    def _note_counted(self, account: EpisodeAccount, count: int, *, settled: bool) -> None:
        self.counted_count += settled
        if count > account.max_count:
            self.duplicated_count += count - account.max_count
            self.problems.append(
                f"episode {account.episode_id}: its guest counted {count} clicks; at most {account.max_count} were"
                f" requested{self._faults_text(account)}"
            )
        elif settled and count < account.performed_count:
            missing = account.performed_count - count
            faults = faults_of(self.faults, account.lineage, by_s=math.inf)
            if any(fault.kind is Fault.MACHINE_STOPPED for fault in faults):
                self.stalled_count += missing
                return
            self.lost_count += missing
            self.problems.append(
                f"episode {account.episode_id}: its guest counted {count} of {account.performed_count} clicks reported"
                f" as performed{self._faults_text(account)}"
            )

    def _faults_text(self, account: EpisodeAccount) -> str:
        faults = faults_of(self.faults, account.lineage, by_s=math.inf)
        return f" (faults of its machine: {', '.join(fault.kind.value for fault in faults) or 'none'})"

    def _note_scored(self, account: EpisodeAccount, score: float, *, sent_s: float) -> None:
        if account.is_scored:
            return  # A score stays valid when the machine is lost later.
        account.is_scored = True
        self.scored_count += 1
        episode, count = account.episode_id, account.performed_count
        bombed = [
            fault for fault in faults_of(self.faults, account.lineage, by_s=math.inf) if fault.kind is Fault.FILE_BOMB
        ]
        if score != (1.0 if count == self._target else 0.0) and not (bombed and score == 0):
            self.fake_rewards.append(
                f"episode {episode}: scored {score:g}, but its guest counted {count} of {self._target}"
            )
        if account.unreported_count:
            return
        if account.is_void:
            self.fake_rewards.append(f"episode {episode}: scored {score:g} although it is void")
        elif score and any(fault.machine_id == account.lineage[0] and fault.begin_s < sent_s for fault in bombed):
            self.fake_rewards.append(f"episode {episode}: scored {score:g} although its guest replaced a file")
        elif any(
            fault.kind is Fault.MACHINE_KILLED
            and fault.machine_id == account.lineage[0] != ""
            and fault.begin_s < sent_s
            for fault in self.faults
        ):
            self.fake_rewards.append(f"episode {episode}: scored {score:g} after its machine was killed")

    def _note_status(self, account: EpisodeAccount | None, event: Mapping[str, Any]) -> None:
        status = Status(
            call=event["call"],
            episode_id=event["episode"],
            sent_s=float(event["sent_s"]),
            end_s=float(event["at_s"]),
            key=event["key"],
            text=event["text"],
            allowed=tuple(event["allowed"]),
        )
        self._statuses.append(status)
        if account is not None and status.key.startswith(("DATA_LOSS", "NOT_FOUND/EPISODE")):
            account.is_over = True
            account.is_void = account.is_void or is_voiding(status.call, status.key)
