"""Decisions of a soak: explanations of errors, and checks of the guests' counters."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from envd.base.config_sources import load
from tests.soak.accounting import Accounting, InjectedFault, Status, is_explained
from tests.soak.messages import GONE, OK, REUSED, TIMED_OUT, WRONG_RESPONSE, Pending
from tests.soak.report import SoakReport
from tests.soak.run import SUITE, soak_config
from tests.soak.schedule import Fault
from tests.support.leftovers import daemon_leftovers

LOST = "DATA_LOSS/MACHINE_LOST"
FAILED = "INTERNAL/EVALUATOR_FAILED"
STEP = Status(call="step", episode_id="a", sent_s=100.0, end_s=110.0, key=LOST, text="", allowed=(OK,))


# -- explanations of errors ---------------------------------------------------------------------------------------


def fault(machine_id: str, begin_s: float, end_s: float, kind: Fault = Fault.MACHINE_KILLED) -> InjectedFault:
    return InjectedFault(kind=kind, machine_id=machine_id, begin_s=begin_s, end_s=end_s)


@pytest.mark.parametrize(
    ("status", "faults", "explained"),
    [
        (STEP, [], False),
        (STEP, [fault("m", 105, 105)], True),
        (STEP, [fault("m", 10, 10)], True),
        (STEP, [fault("m", 111, 112)], False),
        (STEP, [fault("other", 105, 105)], False),
        (STEP, [fault("", 105, 108)], False),
        (STEP, [fault("parent", 105, 105)], False),
        (STEP, [fault("parent", 105, 105, Fault.GUESTD_KILLED)], True),
        (replace(STEP, key="DATA_LOSS/BUG"), [fault("m", 105, 105)], False),
        (replace(STEP, call="reset", episode_id=""), [fault("other", 105, 105)], True),
        (replace(STEP, call="reset", episode_id=""), [fault("other", 10, 10)], False),
        (replace(STEP, key="INTERNAL/BUG"), [fault("m", 105, 105)], False),
        (replace(STEP, key="INTERNAL/HYPERVISOR_ERROR"), [fault("m", 105, 105)], False),
        (replace(STEP, call="fork", key="INTERNAL/HYPERVISOR_ERROR"), [fault("", 105, 106)], True),
        (replace(STEP, call="fork", key="INTERNAL/HYPERVISOR_ERROR"), [], False),
        (replace(STEP, key="RESOURCE_EXHAUSTED/POOL_EXHAUSTED"), [], False),
        (replace(STEP, call="reset", key="RESOURCE_EXHAUSTED/POOL_EXHAUSTED"), [], True),
        (replace(STEP, key="RESOURCE_EXHAUSTED", call="reset"), [], False),
        (replace(STEP, key=GONE), [fault("m", 105, 105)], False),
        (replace(STEP, key=GONE, allowed=(OK, GONE)), [], True),
        (replace(STEP, key=TIMED_OUT), [], False),
        (replace(STEP, key=TIMED_OUT, allowed=(OK, TIMED_OUT)), [], True),
        (replace(STEP, key=TIMED_OUT), [fault("m", 80, 90)], True),
        (replace(STEP, key=TIMED_OUT), [fault("m", 10, 20)], True),
        (replace(STEP, key=TIMED_OUT), [fault("m", -70, -60)], False),
        (replace(STEP, key=TIMED_OUT), [fault("other", 80, 90)], False),
        (replace(STEP, key=OK, allowed=(REUSED,)), [fault("m", 105, 105)], False),
        (replace(STEP, key=WRONG_RESPONSE, allowed=()), [fault("m", 105, 105)], False),
        (replace(STEP, call="evaluate", key="INTERNAL/EVALUATOR_FAILED"), [fault("m", 105, 105)], True),
        (replace(STEP, call="evaluate", key="INTERNAL/EVALUATOR_FAILED"), [], False),
        (replace(STEP, key="UNAVAILABLE"), [fault("m", 105, 105)], False),
        (STEP, [fault("m", 105, 105, Fault.AGENT_ATTACK)], True),
        (STEP, [fault("other", 105, 105, Fault.AGENT_ATTACK)], False),
        (replace(STEP, call="reset", episode_id=""), [fault("other", 105, 105, Fault.GUESTD_ATTACK)], False),
        (replace(STEP, call="fork", key=TIMED_OUT), [fault("other", 105, 105, Fault.DISPLAY_ATTACK)], False),
        (STEP, [fault("m", 105, 105, Fault.FILE_BOMB)], False),
        (replace(STEP, call="evaluate", key=FAILED), [fault("m", 105, 105, Fault.FILE_BOMB)], True),
        (replace(STEP, call="evaluate", key=FAILED), [fault("parent", 105, 105, Fault.FILE_BOMB)], True),
        (replace(STEP, call="evaluate", key=FAILED), [fault("other", 105, 105, Fault.FILE_BOMB)], False),
        (replace(STEP, call="evaluate", key=TIMED_OUT), [fault("m", 105, 105, Fault.FILE_BOMB)], True),
        (replace(STEP, call="evaluate", key=TIMED_OUT), [fault("other", 105, 105, Fault.FILE_BOMB)], False),
    ],
)
def test_only_faults_and_the_clients_behaviour_explain_an_error(
    status: Status, faults: list[InjectedFault], explained: bool
) -> None:
    assert (
        is_explained(status, faults, lineage=("m", "parent") if status.episode_id else (), runs_guests=False)
        is explained
    )


def test_a_real_machine_may_have_state_that_cannot_be_forked() -> None:
    status = replace(STEP, call="fork", key="FAILED_PRECONDITION/NOT_FORKABLE")
    assert is_explained(status, [], lineage=("m",), runs_guests=True)
    assert not is_explained(status, [], lineage=("m",), runs_guests=False)


# -- the guests' counters -----------------------------------------------------------------------------------------


class Events:
    """An accounting, and a client that sends it events."""

    def __init__(self) -> None:
        self.machines: dict[str, str] = {}
        self.accounting = Accounting(
            target=5, runs_guests=False, machine_of=lambda name: self.machines.get(name, f"machine-of-{name}")
        )
        self.now_s = 100.0

    def emit(self, event: str, client: int = 1, **more: Any) -> None:
        self.now_s += 1
        self.accounting.note(client, json.loads(json.dumps({"event": event, "at_s": self.now_s, **more})))

    def open(self, episode: str, *, parent: str = "", performed: int = 0, step_count: int = 0) -> None:
        self.emit("opened", episode=episode, performed=performed, step_count=step_count, parent=parent)

    def send(self, episode: str, count: int, *, step_index: int = 0) -> str:
        pending = Pending(call="step", request_id=f"{episode}-{step_index}", step_index=step_index, count=count)
        self.emit("sent", episode=episode, pending=asdict(pending))
        return pending.request_id

    def step(self, episode: str, count: int, *, step_index: int = 0) -> None:
        self.emit("ended", id=self.send(episode, count, step_index=step_index), episode=episode, performed=count)

    def count(self, episode: str, count: int, *, settled: bool = True) -> tuple[int, int]:
        self.emit("counted", episode=episode, count=count, settled=settled)
        return self.accounting.duplicated_count, self.accounting.lost_count


@pytest.mark.parametrize(("counted", "found"), [(3, (0, 0)), (4, (1, 0)), (6, (3, 0)), (2, (0, 1)), (0, (0, 3))])
def test_the_guest_must_have_counted_exactly_the_acknowledged_clicks(counted: int, found: tuple[int, int]) -> None:
    events = Events()
    events.open("a")
    events.step("a", 1)
    events.step("a", 2, step_index=1)
    assert events.count("a", counted) == found
    assert bool(events.accounting.problems) is (found != (0, 0))


@pytest.mark.parametrize(("counted", "found"), [(1, (0, 0)), (2, (0, 0)), (4, (0, 0)), (5, (1, 0)), (0, (0, 1))])
def test_clicks_of_a_running_step_may_or_may_not_be_counted(counted: int, found: tuple[int, int]) -> None:
    events = Events()
    events.open("a")
    events.step("a", 1)
    events.send("a", 3, step_index=1)
    assert events.count("a", counted) == found


@pytest.mark.parametrize("machine", ["machine-of-a", "machine-of-b"])
def test_a_stopped_guest_may_miss_clicks_but_never_counts_more(machine: str) -> None:
    events = Events()
    events.open("a")
    events.open("b", parent="a")
    events.accounting.faults.append(fault(machine, events.now_s, events.now_s + 5, Fault.MACHINE_STOPPED))
    events.step("b", 3)
    assert events.count("b", 2) == (0, 0)
    assert events.accounting.stalled_count == 1
    assert events.count("b", 4) == (1, 0)


def test_the_clicks_of_a_failed_step_stay_unknown() -> None:
    events = Events()
    events.open("a")
    events.emit("ended", id=events.send("a", 2), episode="a", performed=None)
    assert events.count("a", 2) == (0, 0)
    assert events.count("a", 3) == (1, 0)


def test_an_early_count_may_be_too_low_but_not_too_high() -> None:
    events = Events()
    events.open("a")
    events.step("a", 2)
    assert events.count("a", 1, settled=False) == (0, 0)
    assert events.count("a", 3, settled=False) == (1, 0)


def test_a_fork_starts_with_its_parents_count() -> None:
    events = Events()
    events.open("a")
    events.step("a", 2)
    events.open("b", parent="a", performed=2, step_count=1)
    events.step("b", 1, step_index=1)
    assert events.count("b", 3) == (0, 0)
    assert events.count("a", 3) == (1, 0)
    assert events.accounting.fork_count == 1


def rolled_back(events: Events, episode: str) -> None:
    """Store a checkpoint after one step, and go back to it after another one."""
    events.open(episode)
    events.step(episode, 2)
    events.emit("stored", episode=episode, checkpoint="c")
    events.step(episode, 3, step_index=1)
    pending = Pending(call="rollback", request_id="r", step_index=1, checkpoint_id="c", performed_count=2)
    events.emit("sent", episode=episode, pending=asdict(pending))
    assert events.count(episode, 2, settled=False) == (0, 0)
    events.machines[episode] = "second"
    events.emit("rolled_back", id="r", episode=episode)


def test_after_a_rollback_a_guest_has_the_count_of_the_checkpoint() -> None:
    events, name = Events(), "a"
    rolled_back(events, name)
    assert events.count(name, 2) == (0, 0)
    events.step(name, 1, step_index=1)
    assert events.count(name, 3) == (0, 0)
    assert events.count(name, 5) == (2, 0)
    events.open("copy", performed=2, step_count=1)
    assert events.count("copy", 2) == (2, 0)
    assert (events.accounting.checkpoint_count, events.accounting.rollback_count) == (1, 1)


@pytest.mark.parametrize(("machine", "count"), [("machine-of-a", 0), ("second", 0), ("other", 1), ("machine-of-b", 1)])
def test_faults_of_all_its_machines_explain_the_errors_of_an_episode(machine: str, count: int) -> None:
    events = Events()
    rolled_back(events, "a")
    events.accounting.faults.append(fault(machine, 50.0, 50.0))
    status: dict[str, Any] = {"call": "step", "sent_s": 100.0, "key": LOST, "text": "", "allowed": [OK]}
    events.emit("status", episode="a", **status)
    assert len(events.accounting.unexplained()) == count


def test_the_machine_of_a_rollback_whose_response_is_late_is_known_from_its_fault() -> None:
    events = Events()
    events.open("a")
    events.machines["a"] = "second"
    events.accounting.faults.append(fault("second", 50.0, 50.0))
    events.accounting.note_machine("second")
    events.machines["a"] = ""
    status: dict[str, Any] = {"call": "read", "sent_s": 100.0, "key": LOST, "text": "", "allowed": [OK]}
    events.emit("status", episode="a", **status)
    assert events.accounting.unexplained() == []


@pytest.mark.parametrize(("performed", "score", "is_fake"), [(5, 1, 0), (5, 0, 1), (4, 0, 0), (4, 1, 1)])
def test_a_score_must_match_the_guests_count(performed: int, score: float, is_fake: int) -> None:
    events = Events()
    events.open("a")
    events.step("a", performed)
    events.emit("scored", episode="a", score=score, sent_s=events.now_s)
    assert len(events.accounting.fake_rewards) == is_fake


@pytest.mark.parametrize(
    ("kind", "machine", "age_s", "is_fake"),
    [
        (Fault.MACHINE_KILLED, "machine-of-a", 1.0, 1),
        (Fault.MACHINE_KILLED, "machine-of-a", -1.0, 0),
        (Fault.MACHINE_KILLED, "machine-of-b", 1.0, 0),
        (Fault.MACHINE_STOPPED, "machine-of-a", 1.0, 0),
    ],
)
def test_a_machine_killed_before_the_evaluation_has_no_score(
    kind: Fault, machine: str, age_s: float, is_fake: int
) -> None:
    events = Events()
    events.open("a")
    events.accounting.faults.append(fault(machine, events.now_s - age_s, events.now_s - age_s, kind))
    events.emit("scored", episode="a", score=0.0, sent_s=events.now_s)
    assert len(events.accounting.fake_rewards) == is_fake


@pytest.mark.parametrize(
    ("machine", "age_s", "score", "is_fake"),
    [
        ("machine-of-a", 1.0, 0.0, 0),
        ("machine-of-a", 1.0, 1.0, 1),
        ("machine-of-a", -1.0, 1.0, 0),
        ("machine-of-parent", 1.0, 0.0, 0),
        ("machine-of-b", 1.0, 0.0, 1),
        ("machine-of-b", 1.0, 1.0, 0),
    ],
)
def test_an_episode_with_a_hostile_file_may_score_zero_but_not_one(
    machine: str, age_s: float, score: float, is_fake: int
) -> None:
    events = Events()
    events.open("parent")
    events.open("a", parent="parent")
    events.step("a", 5)
    events.accounting.faults.append(fault(machine, events.now_s - age_s, events.now_s - age_s, Fault.FILE_BOMB))
    events.emit("scored", episode="a", score=score, sent_s=events.now_s)
    assert len(events.accounting.fake_rewards) == is_fake


def test_a_score_stays_valid_when_the_machine_dies_later() -> None:
    events = Events()
    events.open("a")
    events.emit("scored", episode="a", score=0.0, sent_s=events.now_s)
    events.accounting.faults.append(fault("machine-of-a", events.now_s, events.now_s))
    events.emit("scored", episode="a", score=0.0, sent_s=events.now_s + 1)
    assert events.accounting.fake_rewards == []


@pytest.mark.parametrize(
    ("call", "key", "is_fake"),
    [
        ("step", LOST, 1),
        ("fork", "DATA_LOSS/GUEST_ERROR", 1),
        ("read", LOST, 1),
        ("read", "DATA_LOSS/GUEST_UNRESPONSIVE", 0),
        ("step", TIMED_OUT, 0),
    ],
)
def test_a_void_episode_has_no_score(call: str, key: str, is_fake: int) -> None:
    events = Events()
    events.open("a")
    events.emit("status", call=call, episode="a", sent_s=events.now_s, key=key, text="", allowed=[OK])
    events.emit("evaluating", episode="a")
    events.emit("evaluated", episode="a")
    events.emit("scored", episode="a", score=0.0, sent_s=events.now_s)
    assert len(events.accounting.fake_rewards) == is_fake


def test_a_score_that_a_killed_client_did_not_receive_may_be_returned_after_the_machine_died() -> None:
    events = Events()
    events.open("a")
    events.emit("evaluating", episode="a")
    events.accounting.faults.append(fault("machine-of-a", events.now_s, events.now_s))
    events.emit("status", call="read", episode="a", sent_s=events.now_s, key=LOST, text="", allowed=[OK])
    events.emit("evaluating", episode="a")
    events.emit("evaluated", episode="a")
    events.emit("scored", episode="a", score=0.0, sent_s=events.now_s)
    assert events.accounting.fake_rewards == []


def test_an_error_is_judged_by_the_machine_of_its_episode() -> None:
    events = Events()
    events.open("a")
    for episode in ("a", "unknown"):
        events.emit("status", call="step", episode=episode, sent_s=events.now_s, key=LOST, text="gone", allowed=[OK])
    events.accounting.faults.append(fault("machine-of-a", 50.0, 50.0))
    assert events.accounting.unexplained() == ["step of unknown: DATA_LOSS/MACHINE_LOST: gone"]
    assert events.accounting.error_counts() == {"step DATA_LOSS/MACHINE_LOST": 2}


def test_the_episodes_of_a_killed_client_are_known_with_their_last_request() -> None:
    events = Events()
    for episode in ("a", "b", "c", "d"):
        events.open(episode)
    events.step("a", 2)
    request_id = events.send("a", 1, step_index=1)
    events.emit("closing", episode="b")
    events.emit("status", call="step", episode="c", sent_s=events.now_s, key=LOST, text="", allowed=[OK])
    events.emit("sent", episode="", pending=asdict(Pending(call="reset", request_id="r", count=2)))
    events.open("other")
    events.accounting.episodes["other"].client = 2
    assert events.accounting.is_in_call(1)
    assert not events.accounting.is_in_call(2)
    orphans, resets = events.accounting.client_died(1)
    by_id = {orphan.episode_id: orphan for orphan in orphans}
    assert set(by_id) == {"a", "d"}
    assert (by_id["a"].performed_count, by_id["a"].step_count) == (2, 1)
    assert by_id["a"].pending == Pending(call="step", request_id=request_id, step_index=1, count=1)
    assert [reset.request_id for reset in resets] == ["r"]
    events.accounting.assign([by_id["a"]], 3)
    events.accounting.assign([by_id["d"]], None)
    assert [orphan.episode_id for orphan in events.accounting.client_died(3)[0]] == ["a"]
    assert events.accounting.client_kill_count == 2


def test_an_episode_whose_killed_client_requested_its_score_is_not_continued() -> None:
    events = Events()
    events.open("a")
    events.open("b")
    events.emit("evaluating", episode="a")
    assert [orphan.episode_id for orphan in events.accounting.client_died(1)[0]] == ["b"]
    assert events.accounting.episodes["a"].is_over


# -- plan, report, settings ---------------------------------------------------------------------------------------


def report_of(**changes: Any) -> SoakReport:
    """Return the report of a soak with three faults, with some attributes of its accounting changed."""
    accounting = Accounting(target=5, runs_guests=False, machine_of=lambda _: "")
    kinds = (Fault.MACHINE_KILLED, Fault.MACHINE_KILLED, Fault.FORK_SLOW)
    accounting.faults += [fault("m", 1.0, 1.0, kind) for kind in kinds]
    for name, value in changes.items():
        setattr(accounting, name, value)
    return SoakReport(conditions={}, accounting=accounting, longest_stall_s=0.012, leftovers=())


def report_with_an_unexplained_error() -> SoakReport:
    events = Events()
    events.emit("status", call="step", episode="a", sent_s=1.0, key=LOST, text="gone", allowed=[OK])
    return SoakReport(conditions={}, accounting=events.accounting, longest_stall_s=0.0, leftovers=())


@pytest.mark.parametrize(
    ("report", "key"),
    [
        (report_of(duplicated_count=1), "duplicated_actions"),
        (report_of(lost_count=1), "lost_actions"),
        (report_of(fake_rewards=["a"]), "fake_zero_rewards"),
        (replace(report_of(), leftovers=("a",)), "leftovers"),
        (report_with_an_unexplained_error(), "unexplained_errors"),
    ],
)
def test_a_soak_fails_if_any_figure_that_must_be_zero_is_not(report: SoakReport, key: str) -> None:
    assert report_of().passed
    faults = {"total": 3, "hostile_guests": 0, "machine_killed": 2, "fork_slow": 1}
    assert report_of().as_json()["faults"] == faults
    assert not report.passed
    assert report.as_json()[key] == 1


def test_a_soak_has_its_own_daemon_and_uses_the_configured_template_directory(tmp_path: Path) -> None:
    flags = {"state_dir": tmp_path, "hypervisor.template_dir": tmp_path / "t"}
    config = soak_config(load(flags=flags), machine_count=3)
    assert config.state_dir == tmp_path / "soak"
    assert config.template_dir == tmp_path / "t"
    assert config.pools["desktop"].capacity == 3
    assert str(SUITE) in config.tasks.suites
    own = soak_config(load(flags={"state_dir": tmp_path}), machine_count=3)
    assert own.template_dir == tmp_path / "soak" / "templates"


def test_leftovers_of_a_daemon_are_found_in_its_directories(tmp_path: Path) -> None:
    assert daemon_leftovers(tmp_path) == []
    (tmp_path / "captures" / "c0ffee").mkdir(parents=True)
    assert daemon_leftovers(tmp_path) == [str(tmp_path / "captures" / "c0ffee")]
    (tmp_path / "owner").write_text("no-such-owner\n")
    (tmp_path / "machines" / "desktop-1").mkdir(parents=True)
    assert str(tmp_path / "machines" / "desktop-1") in daemon_leftovers(tmp_path)
