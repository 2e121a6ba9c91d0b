"""Recovery decisions for a previous daemon's episodes, and the round trip of persisted results."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from cuaenv.actions import Click, Done, PressKeys, Scroll
from cuaenv.region import Region
from envd.base.clock import Clock
from envd.base.config import SettlePolicy
from envd.base.store.store import AnswerRow, EpisodeRow, SqliteStore, Statement, upsert
from envd.desktop.display_connection import ConnectionState
from envd.desktop.observation import (
    ActionOutcome,
    EncodedFrame,
    Encoding,
    Keyframe,
    Observation,
    Point,
    ScreenComparison,
    SettleResult,
)
from envd.episodes.journal import MAX_TEXT_CHARS, dump, load, stored_in, without_pixels
from envd.episodes.progress import AutomaticCheckpoints, EpisodeState, Progress
from envd.episodes.recovery import decide, load_persisted
from envd.episodes.types import OpenedGroup, StepOutcome
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.text import CheckResult, ScoreResult
from envd.tasks.user import Exchange
from tests.support.episode_values import NOON, episode_info, episode_spec

NOW_S = 1_900_000_000.0
SPEC = episode_spec(settle=SettlePolicy(quiet_ms=20), automatic=AutomaticCheckpoints(every_steps=2))
INFO = episode_info(Progress(step_count=3))
FRAME = EncodedFrame(
    frame_id="f",
    image_id="i",
    width_px=4,
    height_px=4,
    screen_width_px=4,
    screen_height_px=4,
    capture_time=NOON,
    content=Keyframe(encoding=Encoding.PNG, data=b"\x89PNG"),
    cursor=Point(1, 2),
)
SEEN = Observation(
    frame=FRAME,
    a11y_tree="<tree>\ud800</tree>",
    terminal="$ ",
    settle=SettleResult(
        settled=False, settle_ms=5.5, change_count=2, moving=(Region(x_px=1, y_px=2, width_px=3, height_px=4),)
    ),
    screen_change=ScreenComparison(base_frame_id="e", changed_fraction=0.5, changed_regions=(), grey_difference=0.25),
    timings_ms={"observe": 1.0},
)
STEP = StepOutcome(
    episode=INFO,
    observation=SEEN,
    outcomes=(ActionOutcome(error="no such key", input_ms=2.0),),
    timings_ms={"total": 9.0},
)
CONNECTION = ConnectionState(pointer=Point(3, 4), is_holding=False, guestd_types=True, home="/home/user")


def row(**fields: object) -> EpisodeRow:
    usual = EpisodeRow(
        episode_id="ep-1",
        owner="trainer",
        spec=dump(SPEC),
        progress=dump(Progress(step_count=3)),
        epoch=1,
        machine_id="desktop-1",
        connection=dump(CONNECTION),
        lease_ttl_s=300.0,
        expire_time_s=NOW_S + 200,
    )
    return replace(usual, **fields)  # type: ignore[arg-type]


DONE = Progress(state=EpisodeState.TERMINATED, end_reason="AGENT_DONE")
RUNNING = AnswerRow(kind="step", scope="ep-1", request_id="r-9", fingerprint=b"f", answer="", time_s=NOW_S - 1)
LAPSED = {"expire_time_s": NOW_S - 1}


@pytest.mark.parametrize(
    ("fields", "running", "is_served", "outcome", "why"),
    [
        ({}, [], True, "resume", ""),
        ({"progress": dump(DONE)}, [], True, "resume", ""),
        ({}, [RUNNING], True, "lost", "restarted during step r-9"),
        (LAPSED, [], True, "expired", "lease expired while no daemon ran"),
        (LAPSED, [RUNNING], True, "lost", "restarted during step r-9"),
        (
            {"progress": dump(Progress(state=EpisodeState.FAILED, end_reason="GUEST_ERROR", cause="no screen"))},
            [],
            True,
            "lost",
            "no screen",
        ),
        ({"connection": dump(replace(CONNECTION, is_holding=True))}, [], True, "lost", "key or button was held"),
        ({}, [], False, "expired", "this one does not"),
        ({"spec": "{}"}, [], True, "expired", "incompatible release"),
        ({"spec": ""}, [], True, "expired", "incompatible release"),
        ({"progress": '{"state": "asleep"}'}, [], True, "expired", "incompatible release"),
        ({"connection": "[" * 5000}, [], True, "expired", "incompatible release"),
        ({"spec": '{"a":' * 5000}, [], True, "expired", "incompatible release"),
        ({"lease_ttl_s": math.inf}, [], True, "expired", "damaged"),
        ({"lease_ttl_s": math.nan}, [], True, "expired", "damaged"),
        ({"lease_ttl_s": -1.0}, [], True, "expired", "damaged"),
        ({"expire_time_s": 1e308}, [], True, "expired", "damaged"),
        ({"epoch": 1 << 31}, [], True, "expired", "damaged"),
        ({"expire_time_s": math.inf}, [], True, "expired", "damaged"),
        ({"progress": r'{"end_reason": "\ud800"}'}, [], True, "expired", "incompatible release"),
        ({"connection": dump(replace(CONNECTION, home="\udfff"))}, [], True, "expired", "incompatible"),
        ({"progress": '{"later": 1}'}, [], True, "expired", "incompatible release"),
        ({"progress": '{"last_action": {"action": "done", "colour": 1}}'}, [], True, "expired", "incompatible release"),
    ],
)
def test_the_outcome_of_each_persisted_episode(
    fields: dict[str, object], running: list[AnswerRow], is_served: bool, outcome: str, why: str
) -> None:
    decision = decide(row(**fields), running, now_s=NOW_S, is_served=lambda _: is_served)
    assert decision.outcome == outcome
    assert why in decision.why
    assert (decision.stored is None) is (outcome == "expired")


@pytest.mark.parametrize("name", [field.name for field in fields(EpisodeRow)])
def test_a_row_with_a_value_of_a_wrong_type_is_an_expired_episode(name: str) -> None:
    # SQLite stores any value in any column.
    wrong = "abc" if isinstance(getattr(row(), name), float | int) else b"abc"
    decision = decide(row(**{name: wrong}), [], now_s=NOW_S, is_served=lambda _: True)
    assert decision.outcome == "expired"


async def test_a_database_with_values_of_wrong_types_does_not_stop_the_start(tmp_path: Path) -> None:
    path = tmp_path / "envd.db"
    store = SqliteStore(path)
    answer = AnswerRow(kind="step", scope="ep-1", request_id="r", fingerprint=b"", answer="{}", time_s=1.0)
    await store.commit(upsert(row()), upsert(answer))
    await store.commit(
        upsert(replace(row(), episode_id="ep-2", expire_time_s="abc")),  # type: ignore[arg-type]
        upsert(replace(row(), episode_id="ep-3", spec=b"abc")),  # type: ignore[arg-type]
        upsert(replace(answer, request_id="s", time_s="abc")),  # type: ignore[arg-type]
        upsert(replace(row(), episode_id="ep-4")),
        Statement("UPDATE episodes SET spec = CAST(x'ff' AS TEXT) WHERE episode_id = 'ep-4'", ()),
    )
    tasks = TaskCatalogue([])
    state = await load_persisted(store, clock=Clock(), pools={"desktop"}, tasks=tasks)
    await store.aclose()
    assert {decision.outcome for decision in state.decisions} == {"expired"}
    assert len(state.decisions) == 4
    assert [each.request_id for each in state.answers] == ["r"]


def test_a_step_is_persisted_without_pixels_and_otherwise_complete() -> None:
    kept = load(StepOutcome, dump(without_pixels(STEP)))
    frame = replace(FRAME, content=None, image_id="")
    assert kept == replace(STEP, observation=replace(SEEN, frame=frame))


def test_half_of_a_surrogate_pair_is_kept_in_a_guests_text_and_refused_elsewhere() -> None:
    outcome = ActionOutcome(error="\ud800", output="\udfff")
    assert load(ActionOutcome, dump(outcome)) == outcome
    assert load(Progress, dump(Progress(cause="\ud800"))).cause == "\ud800"
    with pytest.raises(ValueError, match="lone surrogate"):
        load(StepOutcome, dump(without_pixels(STEP)).replace('"frame_id": "f"', r'"frame_id": "\ud800"'))


def test_long_text_is_not_persisted() -> None:
    long = replace(STEP, observation=replace(SEEN, a11y_tree="x" * (MAX_TEXT_CHARS + 1), terminal="y" * MAX_TEXT_CHARS))
    kept = without_pixels(long).observation
    assert (kept.a11y_tree, kept.terminal) == (None, "y" * MAX_TEXT_CHARS)


def test_a_group_is_persisted_without_pixels() -> None:
    group = OpenedGroup(episodes=(INFO, INFO), observations=(SEEN, SEEN), instruction="Do it.", timings_ms={})
    text = dump(without_pixels(group))
    assert "iVBOR" not in text
    assert len(text) < 4096
    assert load(OpenedGroup, text).episodes == (INFO, INFO)


def test_a_row_has_everything_that_an_episode_has_done() -> None:
    score = ScoreResult(
        score=0.5, checks=(CheckResult(name="c", score=0.5, evidence="\ud800"),), timings_ms={"total": 1.0}
    )
    progress = Progress(
        step_count=3,
        asked=(Exchange("Which?", "That."),),
        people_actions=(Click(1, 2), Scroll(dy=-3, x=1, y=2), PressKeys(["ctrl", "s"])),
        perturbations=("theme",),
        last_checkpoint_id="ckpt-1",
        state=EpisodeState.TERMINATED,
        end_reason="AGENT_DONE",
        cause="SESSION_ENDED",
        last_action=Done(answer="42"),
        score=score,
        evaluator_error="a checker failed",
    )
    default = Progress()
    assert [each.name for each in fields(Progress) if getattr(progress, each.name) == getattr(default, each.name)] == []
    assert stored_in(row(progress=dump(progress))) == (SPEC, progress, CONNECTION)
