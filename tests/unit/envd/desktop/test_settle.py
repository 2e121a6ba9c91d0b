"""When a screen counts as settled."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from cuaenv.region import Region
from envd.base.config import SettlePolicy
from envd.desktop.observation import SettleResult
from envd.desktop.settler import decide, settle

SPINNER = Region(x_px=9, y_px=9, width_px=8, height_px=8)
POLICY = SettlePolicy(idle_ms=0, quiet_ms=300, min_ms=0, max_ms=5000)
IDLE = SettlePolicy(quiet_ms=300, idle_ms=50)


def state(
    *,
    now: float,
    change: float = -10.0,
    seen: float,
    began: float = 0.0,
    after_input: float = 0.0,
    busy: float = -10.0,
    working: float | None = None,
    was_idle: bool = False,
) -> dict[str, Any]:
    return {
        "now_s": now,
        "began_s": began,
        "input_s": after_input,
        "change_s": change,
        "seen_s": seen,
        "busy_s": busy,
        "working_s": working,
        "was_idle": was_idle,
    }


@pytest.mark.parametrize(
    ("policy", "screen", "decision"),
    [
        (POLICY, state(now=0.31, seen=0.30), True),
        (POLICY, state(now=0.31, seen=0.29), 0.0),  # quiet by the clock, but not proven by a refresh
        (POLICY, state(now=0.10, seen=0.09), 0.05),
        (POLICY, state(now=0.28, seen=0.27), 0.02),
        (POLICY, state(now=0.50, seen=0.49, change=0.30), 0.05),
        (POLICY, state(now=0.61, seen=0.60, change=0.30), True),
        (POLICY, state(now=5.00, seen=4.99, change=4.90), False),
        (POLICY, state(now=4.99, seen=4.98, change=4.90), 0.01),
        # Time before the call counts as quiet: only one refresh is needed.
        (POLICY, state(now=9.01, began=9.0, seen=9.0), True),
        (POLICY, state(now=9.01, began=9.0, seen=9.0, change=8.9), 0.05),
        (SettlePolicy(idle_ms=0, quiet_ms=0), state(now=0.001, seen=0.0), True),
        # With quiet_ms=0 one refresh after the input is enough, whatever it found.
        (SettlePolicy(idle_ms=0, quiet_ms=0), state(now=0.02, seen=0.0, change=0.01), True),
        (SettlePolicy(idle_ms=0, quiet_ms=0), state(now=0.02, seen=0.0, after_input=0.01), 0.0),
        (SettlePolicy(idle_ms=0, quiet_ms=1), state(now=0.02, seen=0.0, change=0.01), 0.0),
        (SettlePolicy(idle_ms=0, quiet_ms=0, min_ms=200), state(now=0.1, seen=0.1), 0.05),
        (SettlePolicy(idle_ms=0, quiet_ms=0, min_ms=200), state(now=0.21, seen=0.2), True),
        (SettlePolicy(idle_ms=0, quiet_ms=300, max_ms=0), state(now=0.01, seen=0.0), False),
        # A busy guest may be about to draw; one that is always busy is waited for at most 1.5 s.
        (POLICY, state(now=0.31, seen=0.30, busy=0.31), 0.05),
        (POLICY, state(now=0.43, seen=0.42, busy=0.31), True),
        (POLICY, state(now=1.79, seen=1.78, busy=1.79), 0.01),
        (POLICY, state(now=1.81, seen=1.80, busy=1.81), True),
        # If it was idle before the input and has drawn nothing since, it is waited for at most 4.5 s.
        (POLICY, state(now=1.81, seen=1.80, busy=1.81, was_idle=True), 0.05),
        (POLICY, state(now=1.93, seen=1.92, busy=1.81, was_idle=True), True),
        (POLICY, state(now=4.79, seen=4.78, busy=4.79, was_idle=True), 0.01),
        (POLICY, state(now=4.81, seen=4.80, busy=4.81, was_idle=True), True),
        (POLICY, state(now=1.91, seen=1.90, busy=1.91, change=0.1, was_idle=True), True),
        # These limits count from the beginning of a wait that begins later.
        (POLICY, state(now=10.45, began=9.0, seen=10.44, busy=10.45), 0.05),
        (POLICY, state(now=10.51, began=9.0, seen=10.50, busy=10.51), True),
        # With idle_ms, a guest that handled the input and is idle again has settled.
        (IDLE, state(now=0.08, seen=0.07, working=0.02), True),
        (IDLE, state(now=0.06, seen=0.05, working=0.02), 0.01),
        (IDLE, state(now=0.06, seen=0.05, working=0.06), 0.025),
        (IDLE, state(now=0.09, seen=0.08, change=0.06, working=0.02), 0.02),
        (IDLE.model_copy(update={"min_ms": 200}), state(now=0.08, seen=0.07, working=0.02), 0.025),
        # It is not known whether the guest handled the input.
        (IDLE, state(now=0.08, seen=0.07), 0.05),
        (IDLE, state(now=0.31, seen=0.30), True),
        # A guest that always works, a little, is waited for no longer than with a fixed quiet time.
        (IDLE, state(now=0.31, seen=0.30, working=0.31), True),
        (POLICY, state(now=0.08, seen=0.07, working=0.02), 0.05),
        # Even after max_ms the shadow must be newer than the input.
        (SettlePolicy(idle_ms=0, quiet_ms=300, max_ms=0), state(now=0.2, seen=0.0, after_input=0.1), 0.0),
    ],
)
def test_the_decision_follows_from_the_state(
    policy: SettlePolicy, screen: dict[str, Any], decision: bool | float
) -> None:
    decided = decide(policy, **screen)
    assert type(decided) is type(decision)
    assert decided == pytest.approx(decision)


@dataclass
class DrawnScreen:
    """A screen that changes at given times, with a clock that advances only during waits."""

    changes_s: list[float]
    refresh_takes_s: float = 0.01
    now_s: float = 0.0
    busy_until_s: float = 0.0
    has_processors: bool = True
    refreshes_s: list[float] = field(default_factory=list)
    likely_s: list[float] = field(default_factory=list)
    seen_changes: dict[int, object] = field(default_factory=dict)

    @property
    def changed(self) -> object:
        return self.seen_changes.setdefault(self.change_count, object())

    def likely_settled(self) -> None:
        self.likely_s.append(self.now_s)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    async def refresh(self) -> float:
        sent_s = self.now_s
        self.refreshes_s.append(sent_s)
        self.now_s += self.refresh_takes_s
        return sent_s

    def processor_s(self) -> float | None:
        return min(self.now_s, self.busy_until_s) if self.has_processors else None

    @property
    def last_change_s(self) -> float:
        return max((t for t in self.changes_s if t <= self.now_s), default=-10.0)

    def last_change_outside_s(self, ignored: tuple[Region, ...]) -> float:
        return -10.0 if SPINNER in ignored else self.last_change_s

    def moving_since(self, since_s: float, ignored: tuple[Region, ...]) -> list[Region]:
        is_moving = SPINNER not in ignored and self.last_change_s >= since_s
        return [SPINNER, SPINNER] if is_moving else []

    @property
    def change_count(self) -> int:
        return sum(t <= self.now_s for t in self.changes_s)


async def result_of(
    screen: DrawnScreen,
    policy: SettlePolicy = POLICY,
    *,
    input_s: float = 0.0,
    was_idle: bool = False,
    reacts_before_answer: bool = False,
) -> SettleResult:
    return await settle(
        screen,  # type: ignore[arg-type]
        policy,
        input_s=input_s,
        was_idle=was_idle,
        processor_s=screen.processor_s,
        reacts_before_answer=reacts_before_answer,
        likely_settled=screen.likely_settled,
        monotonic=screen.monotonic,
        sleep=screen.sleep,
    )


#: The display answers only after the guest's programs have the input.
NATIVE = {"reacts_before_answer": True}


@pytest.mark.parametrize(
    ("screen", "policy", "guest", "found", "bounds_ms"),
    [
        # A still screen settles right after the quiet time, and each change restarts that.
        (DrawnScreen([]), POLICY, {}, (True, 0), (300, 330)),
        (DrawnScreen([0.1, 0.2, 0.45]), POLICY, {}, (True, 3), (750, 780)),
        # The screen is quiet for a second, then the busy guest draws.
        (DrawnScreen([1.0], busy_until_s=1.0), POLICY, {}, (True, 1), (1300, 1340)),
        # It always moves.
        (DrawnScreen([i / 10 for i in range(1, 100)]), POLICY, {}, (False, 50), (5000, 5030)),
        # Long after the input one reading shows that a guest is idle, and a busy one has not settled.
        (DrawnScreen([]), POLICY, {"input_s": -10.0}, (True, 0), (0, 50)),
        (DrawnScreen([0.6], busy_until_s=0.7), POLICY, {"input_s": -10.0}, (True, 1), (900, 940)),
        # An idle guest settles without the quiet time.
        (DrawnScreen([0.05], busy_until_s=0.08), IDLE, {}, (True, 1), (130, 190)),
        (DrawnScreen([0.05, 0.4], busy_until_s=0.4), IDLE, {}, (True, 2), (450, 510)),
        (DrawnScreen([0.05, 0.09], busy_until_s=0.001), IDLE, {}, (True, 2), (140, 190)),
        # A guest whose processors did nothing, or are not known, may not have got the input yet.
        (DrawnScreen([]), IDLE, {}, (True, 0), (300, 330)),
        (DrawnScreen([0.2]), IDLE, {}, (True, 1), (500, 530)),
        (DrawnScreen([0.05], has_processors=False), IDLE, {}, (True, 1), (350, 380)),
        # The first window of a program that an idle guest starts is waited for.
        (DrawnScreen([3.5], busy_until_s=3.6), IDLE, {"was_idle": True}, (True, 1), (3640, 3810)),
        # A native guest has the input, draws within the time that the least reading shows as work, or draws later.
        (DrawnScreen([]), IDLE, NATIVE, (True, 0), (40, 80)),
        (DrawnScreen([0.02]), IDLE, NATIVE, (True, 1), (60, 100)),
        (DrawnScreen([0.5], busy_until_s=0.5), IDLE, NATIVE, (True, 1), (540, 600)),
    ],
)
async def test_a_screen_settles_in_time(
    screen: DrawnScreen,
    policy: SettlePolicy,
    guest: dict[str, Any],
    found: tuple[bool, int],
    bounds_ms: tuple[float, float],
) -> None:
    result = await result_of(screen, policy, **guest)
    assert (result.settled, result.change_count) == found
    assert bounds_ms[0] <= result.settle_ms <= bounds_ms[1]


@pytest.mark.parametrize(("busy_until_s", "is_idle", "settle_ms"), [(100.0, False, 1800), (0.0, True, 300)])
async def test_a_guest_that_is_always_busy_is_waited_for_a_bounded_time(
    busy_until_s: float, is_idle: bool, settle_ms: float
) -> None:
    result = await result_of(DrawnScreen([], busy_until_s=busy_until_s))
    assert (result.settled, result.is_idle) == (True, is_idle)
    assert settle_ms <= result.settle_ms <= settle_ms + 40


async def test_the_picture_of_an_idle_guest_is_reported_as_likely_settled_before_it_settles() -> None:
    screen = DrawnScreen([0.05], busy_until_s=0.06)
    result = await result_of(screen, IDLE)
    [likely_s] = screen.likely_s
    assert 0.06 < likely_s < result.settle_ms / 1000


async def test_moving_regions_are_reported_and_can_be_ignored() -> None:
    moving = [i / 10 for i in range(1, 100)]
    result = await result_of(DrawnScreen(moving), POLICY)
    assert (result.settled, result.moving) == (False, (SPINNER,))
    result = await result_of(DrawnScreen(moving), SettlePolicy(idle_ms=0, ignored_regions=(SPINNER,)))
    assert (result.settled, result.moving) == (True, ())
    assert result.settle_ms < 400


async def test_the_display_is_refreshed_while_waiting() -> None:
    screen = DrawnScreen([])
    await result_of(screen)
    gaps = [later - earlier for earlier, later in pairwise(screen.refreshes_s)]
    assert max(gaps) <= 0.061


async def test_a_slow_display_delays_the_decision_and_does_not_change_it() -> None:
    screen = DrawnScreen([0.35], refresh_takes_s=0.2)
    result = await result_of(screen)
    assert (result.settled, result.change_count) == (True, 1)
    assert result.settle_ms >= 650
    assert screen.refreshes_s[-1] >= 0.65


async def test_a_max_ms_of_zero_still_refreshes_once() -> None:
    screen = DrawnScreen([])
    assert not (await result_of(screen, SettlePolicy(idle_ms=0, max_ms=0))).settled
    assert screen.refreshes_s == [0.0]


async def test_a_likely_settled_picture_is_reported_once_and_again_after_a_change() -> None:
    screen = DrawnScreen([0.1, 0.35])
    await result_of(screen)
    first, second = screen.likely_s
    assert 0.25 <= first < 0.35, "half of the quiet time after the first change"
    assert 0.5 <= second < 0.65


async def test_a_screen_that_settles_at_the_first_refresh_is_not_reported_as_likely_settled() -> None:
    screen = DrawnScreen([])
    await result_of(screen, SettlePolicy(idle_ms=0, quiet_ms=0))
    assert screen.likely_s == []
