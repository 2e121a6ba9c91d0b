"""Conversion of results to messages, and pages of listings."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuaenv.client
from cuaenv.client.results import read_unrecorded
from cuaenv.region import Region
from cuaenv.results import UnrecordedRequest
from cuaenv.v1 import env_pb2
from envd.api.convert_results import (
    episode_message,
    evaluate_response,
    fork_response,
    frame_message,
    observation_message,
    pool_messages,
    reset_response,
    step_response,
    task_message,
)
from envd.api.pages import page_of
from envd.base.errors import InvalidRequest
from envd.desktop.observation import (
    ActionOutcome,
    EncodedFrame,
    Encoding,
    Keyframe,
    Observation,
    Point,
    ScreenComparison,
    SettleResult,
    TileDelta,
    UnchangedImage,
)
from envd.episodes.progress import EpisodeOrigin, EpisodeState, EpisodeStatus, Progress
from envd.episodes.types import EvaluateResult, OpenedGroup, StepOutcome
from envd.hypervisor.machine import GuestOs
from envd.pool.status import PoolStatus
from envd.tasks.model import Task
from envd.tasks.text import CheckResult
from tests.support.episode_values import episode_spec
from tests.support.stub_episodes import pool_info

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


ORIGIN = EpisodeOrigin(template_digest="t1", overlay_parent="d1", first_frame_id="f1")


def info(
    episode_id: str = "ep-1",
    *,
    state: EpisodeState = EpisodeState.ACTIVE,
    end_reason: str = "",
    parent_episode_id: str = "",
) -> EpisodeStatus:
    return EpisodeStatus(
        spec=episode_spec(
            episode_id=episode_id,
            parent_episode_id=parent_episode_id,
            task_id="desktop/note",
            pool="debian",
            create_time=MOMENT,
            max_steps=15,
            run="run-1",
            origin=ORIGIN,
        ),
        progress=Progress(state=state, end_reason=end_reason, step_count=3),
        epoch=1,
        expire_time=MOMENT + timedelta(minutes=5),
    )


def observation(frame_id: str = "f1", *, encoding: Encoding = Encoding.PNG, tree: str | None = None) -> Observation:
    frame = EncodedFrame(
        frame_id=frame_id,
        width_px=640,
        height_px=400,
        screen_width_px=1280,
        screen_height_px=800,
        capture_time=MOMENT,
        image_id="i1",
        content=None if encoding is Encoding.NONE else Keyframe(encoding=encoding, data=b"pixels"),
    )
    return Observation(frame=frame, a11y_tree=tree, timings_ms={"encode": 2.5})


def test_a_reset_response_has_each_episode_and_its_first_observation() -> None:
    response = reset_response(
        OpenedGroup(
            episodes=(info("ep-1"), info("ep-2")),
            observations=(observation("f1"), observation("f1")),
            instruction="Write a note.",
            timings_ms={"setup": 12.0},
        )
    )
    assert [episode.episode_id for episode in response.episodes] == ["ep-1", "ep-2"]
    wire_origin = env_pb2.Origin(template_digest="t1", overlay_parent="d1", first_frame_id="f1")
    assert [episode.origin for episode in response.episodes] == [wire_origin, wire_origin]
    assert [seen.frame.frame_id for seen in response.observations] == ["f1", "f1"]
    assert (response.instruction, dict(response.timings_ms)) == ("Write a note.", {"setup": 12.0})


def test_a_fork_response_has_each_copy_and_its_origin() -> None:
    response = fork_response(
        OpenedGroup(
            episodes=(info("ep-2", parent_episode_id="ep-1"), info("ep-3", parent_episode_id="ep-1")),
            observations=(observation("f1"), observation("f1")),
            timings_ms={"pause": 12.0},
        )
    )
    assert [(copy.episode_id, copy.parent_episode_id) for copy in response.episodes] == [
        ("ep-2", "ep-1"),
        ("ep-3", "ep-1"),
    ]
    assert {(copy.group_id, copy.step_count) for copy in response.episodes} == {("group-1", 3)}
    assert {copy.origin.template_digest for copy in response.episodes} == {"t1"}
    assert [seen.frame.frame_id for seen in response.observations] == ["f1", "f1"]
    assert dict(response.timings_ms) == {"pause": 12.0}


def test_an_origin_is_sent_only_when_an_episode_is_opened() -> None:
    assert not episode_message(info()).HasField("origin")


def test_a_step_response_has_the_result_of_each_action() -> None:
    response = step_response(
        StepOutcome(
            episode=info(),
            observation=observation(),
            outcomes=(ActionOutcome(input_ms=1.5), ActionOutcome(error="no key 'foo'")),
            timings_ms={"input": 1.5},
            replayed=True,
        )
    )
    assert [(result.error, result.input_ms) for result in response.action_results] == [("", 1.5), ("no key 'foo'", 0)]
    assert response.replayed


def test_a_step_response_names_what_the_web_recording_does_not_have() -> None:
    missing = (
        UnrecordedRequest(kind="not_recorded", method="GET", url="https://example.org/\udc80"),
        UnrecordedRequest(kind="websocket", method="GET", url="https://example.org/socket"),
    )
    response = step_response(
        StepOutcome(episode=info(), observation=observation(), outcomes=(), timings_ms={}, unrecorded=missing)
    )
    assert list(map(read_unrecorded, response.unrecorded_requests)) == [
        cuaenv.client.UnrecordedRequest(kind="not_recorded", method="GET", url="https://example.org/?"),
        cuaenv.client.UnrecordedRequest(kind="websocket", method="GET", url="https://example.org/socket"),
    ]


def test_an_evaluate_response_has_the_evidence_of_each_check() -> None:
    check = CheckResult(name="file", score=0.5, evidence="half of the lines")
    response = evaluate_response(EvaluateResult(episode=info(), score=0.5, checks=(check,), timings_ms={}, cached=True))
    assert response.checks[0] == env_pb2.Check(name="file", score=0.5, evidence="half of the lines")
    assert (response.score, response.cached) == (0.5, True)


@pytest.mark.parametrize(
    ("state", "wire"),
    [
        (EpisodeState.ACTIVE, env_pb2.Episode.STATE_ACTIVE),
        (EpisodeState.TERMINATED, env_pb2.Episode.STATE_TERMINATED),
        (EpisodeState.TRUNCATED, env_pb2.Episode.STATE_TRUNCATED),
        (EpisodeState.FAILED, env_pb2.Episode.STATE_FAILED),
    ],
)
def test_every_state_has_its_own_value(state: EpisodeState, wire: int) -> None:
    message = episode_message(info(state=state, end_reason="MAX_STEPS"))
    assert (message.state, message.end_reason) == (wire, "MAX_STEPS")
    assert message.create_time.ToDatetime(tzinfo=UTC) == MOMENT
    assert message.expire_time.ToDatetime(tzinfo=UTC) == MOMENT + timedelta(minutes=5)


@pytest.mark.parametrize(
    ("content", "wire"),
    [
        (
            Keyframe(encoding=Encoding.RAW_ZSTD, data=b"z"),
            env_pb2.Frame(keyframe=env_pb2.Keyframe(encoding=env_pb2.ENCODING_RAW_ZSTD, data=b"z")),
        ),
        (
            TileDelta(base_image_id="i0", tiles=(Region(x_px=64, y_px=0, width_px=64, height_px=64),), data=b"z"),
            env_pb2.Frame(
                tiles=env_pb2.TileDelta(
                    base_image_id="i0", tiles=[env_pb2.Rect(x_px=64, width_px=64, height_px=64)], data=b"z"
                )
            ),
        ),
        (UnchangedImage(base_image_id="i0"), env_pb2.Frame(unchanged=env_pb2.Unchanged(base_image_id="i0"))),
    ],
)
def test_a_frame_is_a_keyframe_or_a_delta(content: Keyframe | TileDelta | UnchangedImage, wire: env_pb2.Frame) -> None:
    frame = replace(observation().frame, content=content, cursor=Point(3, 4))
    message = frame_message(frame)
    assert (message.image_id, message.cursor.x, message.cursor.y) == ("i1", 3, 4)
    kind = wire.WhichOneof("content")
    assert message.WhichOneof("content") == kind
    assert kind is not None
    assert getattr(message, kind) == getattr(wire, kind)


def test_a_step_response_has_changed_and_moving_regions() -> None:
    part = Region(x_px=1, y_px=2, width_px=3, height_px=4)
    change = ScreenComparison(base_frame_id="f0", changed_fraction=0.25, changed_regions=(part,))
    settle = SettleResult(settled=False, settle_ms=5.0, change_count=2, moving=(part,))
    seen = replace(observation(), screen_change=change, settle=settle)
    response = step_response(StepOutcome(episode=info(), observation=seen, outcomes=(), timings_ms={}))
    rect = env_pb2.Rect(x_px=1, y_px=2, width_px=3, height_px=4)
    assert response.screen_change == env_pb2.ScreenChange(
        base_frame_id="f0", changed_fraction=0.25, changed_regions=[rect]
    )
    assert not response.screen_change.HasField("grey_difference"), "0 would be a measured value"
    assert response.observation.settle == env_pb2.SettleResult(
        settled=False, settle_ms=5.0, change_count=2, moving_regions=[rect]
    )


def test_parts_that_were_not_requested_are_absent() -> None:
    message = observation_message(observation(encoding=Encoding.NONE))
    assert message.frame.WhichOneof("content") is None
    assert (message.frame.screen.width_px, message.frame.width_px) == (1280, 640)
    assert not message.HasField("a11y_tree")
    assert not message.HasField("terminal")
    assert not message.HasField("settle")


def test_a_tree_is_present_even_if_empty_and_may_have_a_lone_surrogate() -> None:
    assert observation_message(observation(tree="")).HasField("a11y_tree")
    assert observation_message(observation(tree="a\ud800b")).a11y_tree == "a?b"


def pool(name: str, *, healthy: bool = True, problem: str = "") -> PoolStatus:
    counts = {"starting_count": 3, "dying_count": 4, "waiting_count": 5, "memory_bytes": 6, "pss_bytes": 7}
    state = {"healthy": healthy, "problem": problem, "template_digest": "t1", "always_running": True}
    return pool_info(8, name=name, idle=1, leased=2, accelerator="tcg", **counts, **state)


def test_pools_are_sorted_by_name_and_have_their_health() -> None:
    messages = pool_messages(
        [pool("c", healthy=False, problem="disk full"), pool("b", problem="1 of 3 failed"), pool("a")]
    )
    assert [(message.name, message.health) for message in messages] == [
        ("a", env_pb2.Pool.HEALTH_HEALTHY),
        ("b", env_pb2.Pool.HEALTH_DEGRADED),
        ("c", env_pb2.Pool.HEALTH_FAILING),
    ]
    counts = messages[0]
    assert (counts.capacity_count, counts.idle_count, counts.leased_count, counts.starting_count) == (8, 1, 2, 3)
    assert (counts.dying_count, counts.waiting_count, counts.memory_bytes, counts.pss_bytes) == (4, 5, 6, 7)
    assert (counts.template_digest, counts.always_running) == ("t1", True)


def test_a_task_is_sent_without_its_checker_and_oracle() -> None:
    task = Task(
        task_id="desktop/impossible",
        instruction="Do it.",
        level=2,
        tags=("x",),
        infeasible=True,
        os=GuestOs.LINUX,
        domain="editor",
        split="held_out",
    )
    assert task_message(task, variant_count=3, obstacles=None) == env_pb2.Task(
        task_id="desktop/impossible",
        instruction="Do it.",
        level=2,
        suite="desktop",
        version=1,
        tags=["x"],
        max_steps=task.max_steps,
        os="linux",
        domain="editor",
        split="held_out",
        variant_count=3,
    )


@given(keys=st.sets(st.text(min_size=1)), page_size=st.integers(min_value=1, max_value=7))
def test_pages_hold_every_item_once_and_in_order(keys: set[str], page_size: int) -> None:
    seen: list[str] = []
    token = ""
    for _ in range(len(keys) + 1):
        items, token = page_of(keys, key=str, page_size=page_size, page_token=token)
        seen += items
        if not token:
            break
    assert seen == sorted(keys)


def test_items_added_or_removed_between_pages_do_not_affect_others() -> None:
    first, token = page_of("bdfh", key=str, page_size=2, page_token="")
    second, _ = page_of("acfhz", key=str, page_size=2, page_token=token)
    assert (first, second) == (("b", "d"), ("f", "h"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("page_token", "nonsense"), ("page_token", "é"), ("page_token", "AAAA"), ("page_size", -1), ("page_size", 1001)],
)
def test_a_page_token_of_another_listing_and_a_size_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        page_of("ab", key=str, **{"page_size": 1, "page_token": "", field: value})
    assert caught.value.field == field
