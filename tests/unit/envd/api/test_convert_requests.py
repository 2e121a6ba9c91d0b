"""Requests are converted to commands, or to errors that name the field."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from cuaenv.actions import Click, Done
from cuaenv.region import Region
from cuaenv.v1 import env_pb2
from envd.api.convert_requests import (
    DEFAULT_READY_TIMEOUT_S,
    argv_of,
    command_timeout_s,
    fingerprint_of,
    fork_command,
    frames_request,
    guest_path_of,
    keep_alive_of,
    observation_options,
    reset_command,
    score_command,
    settle_policy,
    step_command,
    task_ids_of,
)
from envd.base.config import SettlePolicy
from envd.base.errors import InvalidRequest, Unimplemented
from envd.desktop.observation import A11yFormat, CursorMode, Encoding, ObservationOptions
from envd.episodes.types import ForkCommand, ResetCommand
from envd.tasks.perturbations import PerturbationDraw


def seconds(length_s: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=length_s))
    return duration


def reset(**fields: object) -> env_pb2.ResetRequest:
    return env_pb2.ResetRequest(**{"request_id": "r-1", "task_id": "desktop/note", **fields})  # type: ignore[arg-type]


def step(**fields: object) -> env_pb2.StepRequest:
    done = env_pb2.Action(done=env_pb2.Done())
    defaults = {"request_id": "r-1", "episode_id": "ep-1", "step_index": 0, "actions": [done]}
    return env_pb2.StepRequest(**{**defaults, **fields})  # type: ignore[arg-type]


def command(request: env_pb2.ResetRequest) -> ResetCommand:
    return reset_command(request, time_remaining_s=None)


def test_a_minimal_reset_takes_the_documented_defaults() -> None:
    request = reset()
    assert command(request) == ResetCommand(
        request_id="r-1", task_id="desktop/note", timeout_s=DEFAULT_READY_TIMEOUT_S, fingerprint=fingerprint_of(request)
    )


def test_every_field_of_a_reset_is_converted() -> None:
    request = reset(
        pool="debian",
        group_size=8,
        lease_ttl=seconds(60),
        max_steps=15,
        run="run-7.b",
        settle=env_pb2.SettlePolicy(quiet=seconds(0.1), min=seconds(0.2), max=seconds(2)),
        observation=env_pb2.ObservationOptions(
            encoding=env_pb2.ENCODING_JPEG,
            quality=70,
            region=env_pb2.Rect(x_px=1, y_px=2, width_px=3, height_px=4),
            max_width_px=640,
            max_height_px=480,
            cursor=env_pb2.CURSOR_MODE_HIDDEN,
            a11y_format=env_pb2.A11Y_FORMAT_OSWORLD_XML,
            include_terminal=True,
            known_image_id="ab",
        ),
        ready_timeout=seconds(90),
        perturb=env_pb2.Perturb(seed=7, kinds=["update", "theme"], count=2),
    )
    assert reset_command(request, time_remaining_s=30.0) == ResetCommand(
        request_id="r-1",
        task_id="desktop/note",
        pool="debian",
        group_size=8,
        lease_ttl_s=60.0,
        max_steps=15,
        run="run-7.b",
        settle=SettlePolicy(quiet_ms=100, idle_ms=0, min_ms=200, max_ms=2000),
        observe=ObservationOptions(
            encoding=Encoding.JPEG,
            quality=70,
            region=Region(x_px=1, y_px=2, width_px=3, height_px=4),
            max_width_px=640,
            max_height_px=480,
            a11y_format=A11yFormat.OSWORLD_XML,
            include_terminal=True,
            cursor=CursorMode.HIDDEN,
            known_image_id="ab",
        ),
        perturb=PerturbationDraw(seed=7, kinds=("update", "theme"), count=2),
        timeout_s=90.0,
        fingerprint=fingerprint_of(request),
    )


@pytest.mark.parametrize(("remaining_s", "timeout_s"), [(30.0, 29.5), (0.5, 0.25)])
def test_a_reset_times_out_before_its_callers_deadline(remaining_s: float, timeout_s: float) -> None:
    assert reset_command(reset(), time_remaining_s=remaining_s).timeout_s == timeout_s


def fork(**fields: object) -> env_pb2.ForkRequest:
    defaults = {"request_id": "r-1", "episode_id": "ep-1", "step_index": 3, "fork_count": 2}
    return env_pb2.ForkRequest(**{**defaults, **fields})  # type: ignore[arg-type]


def test_every_field_of_a_fork_is_converted_and_it_times_out_before_its_callers_deadline() -> None:
    request = fork(
        lease_ttl=seconds(60), observation=env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_NONE, max_width_px=640)
    )
    assert fork_command(request, time_remaining_s=30.0) == ForkCommand(
        request_id="r-1",
        episode_id="ep-1",
        step_index=3,
        fork_count=2,
        lease_ttl_s=60.0,
        observe=ObservationOptions(encoding=Encoding.NONE, max_width_px=640),
        timeout_s=29.5,
        fingerprint=fingerprint_of(request),
    )
    assert fork_command(fork(), time_remaining_s=None).timeout_s == DEFAULT_READY_TIMEOUT_S
    assert fork_command(fork(), time_remaining_s=None).lease_ttl_s is None


def convert_step(request: env_pb2.StepRequest) -> object:
    return step_command(request, screen_px=(1, 1), prefix="step.")


def convert_fork(request: env_pb2.ForkRequest) -> ForkCommand:
    return fork_command(request, time_remaining_s=None)


def convert_score(request: env_pb2.EvaluateRequest) -> ResetCommand:
    return score_command(request, time_remaining_s=None)


@pytest.mark.parametrize(
    ("convert", "request_message", "field"),
    [
        (command, reset(request_id=""), "request_id"),
        (command, reset(request_id="a b"), "request_id"),
        (command, reset(request_id="x" * 65), "request_id"),
        (command, reset(request_id="x\n"), "request_id"),
        (command, reset(task_id=""), "task_id"),
        (command, reset(task_id="x" * 257), "task_id"),
        (command, reset(pool="x" * 257), "pool"),
        (command, reset(group_size=-1), "group_size"),
        (command, reset(group_size=65), "group_size"),
        (command, reset(lease_ttl=seconds(9.9)), "lease_ttl"),
        (command, reset(lease_ttl=seconds(3601)), "lease_ttl"),
        (command, reset(lease_ttl=seconds(0)), "lease_ttl"),
        (command, reset(max_steps=-1), "max_steps"),
        (command, reset(run="a/b"), "run"),
        (command, reset(ready_timeout=seconds(0)), "ready_timeout"),
        (command, reset(perturb=env_pb2.Perturb(seed=-1)), "perturb.seed"),
        (command, reset(perturb=env_pb2.Perturb(seed=1 << 31)), "perturb.seed"),
        (command, reset(perturb=env_pb2.Perturb(count=9)), "perturb.count"),
        (command, reset(checkpoint_id="c", perturb=env_pb2.Perturb()), "perturb"),
        (command, reset(settle=env_pb2.SettlePolicy(quiet=seconds(-1))), "settle.quiet"),
        (command, reset(settle=env_pb2.SettlePolicy(max=seconds(301))), "settle.max"),
        (command, reset(settle=env_pb2.SettlePolicy(min=seconds(2), max=seconds(1))), "settle.max"),
        (command, reset(observation=env_pb2.ObservationOptions(quality=101)), "observation.quality"),
        (command, reset(observation=env_pb2.ObservationOptions(max_width_px=-1)), "observation.max_width_px"),
        (command, reset(observation=env_pb2.ObservationOptions(region=env_pb2.Rect())), "observation.region.width_px"),
        (convert_fork, fork(request_id=""), "request_id"),
        (convert_fork, fork(episode_id=""), "episode_id"),
        (convert_fork, fork(step_index=-1), "step_index"),
        (convert_fork, fork(fork_count=0), "fork_count"),
        (convert_fork, fork(fork_count=65), "fork_count"),
        (convert_fork, fork(fork_count=-1), "fork_count"),
        (convert_fork, fork(lease_ttl=seconds(9)), "lease_ttl"),
        (convert_fork, fork(observation=env_pb2.ObservationOptions(quality=101)), "observation.quality"),
        (convert_step, step(request_id=""), "step.request_id"),
        (convert_step, step(episode_id=""), "step.episode_id"),
        (convert_step, step(episode_id="x" * 65), "step.episode_id"),
        (convert_step, step(step_index=-1), "step.step_index"),
        (convert_step, step(actions=[]), "step.actions"),
        (convert_step, step(coordinate_space=env_pb2.Size(width_px=10)), "step.coordinate_space.height_px"),
        (convert_step, step(observation=env_pb2.ObservationOptions(quality=-1)), "step.observation.quality"),
        (convert_step, step(settle=env_pb2.SettlePolicy(quiet=seconds(61))), "step.settle.quiet"),
        (convert_score, env_pb2.EvaluateRequest(request_id="r", checkpoint_id="c" * 65), "checkpoint_id"),
        (convert_score, env_pb2.EvaluateRequest(request_id="r", checkpoint_id="c", episode_id="e"), "episode_id"),
        (convert_score, env_pb2.EvaluateRequest(request_id="r", checkpoint_id="c", epoch=1), "epoch"),
        (argv_of, env_pb2.RunGuestCommandRequest(), "argv"),
        (argv_of, env_pb2.RunGuestCommandRequest(argv=[""]), "argv[0]"),
        (argv_of, env_pb2.RunGuestCommandRequest(argv=["ls", "a\0"]), "argv[1]"),
        (command_timeout_s, env_pb2.RunGuestCommandRequest(timeout=seconds(601)), "timeout"),
        *((guest_path_of, path, "path") for path in ("", "notes.txt", "~/notes.txt", "/a\0b")),
        pytest.param(guest_path_of, "/" + "x" * 4096, "path", id="long path"),
        (task_ids_of, ["a/b", ""], "task_ids[1]"),
        (keep_alive_of, env_pb2.KeepAliveRequest(episode_ids=["ep-1", ""]), "episode_ids[1]"),
    ],
)
def test_a_bad_field_is_named(convert: Callable[[Any], object], request_message: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert(request_message)
    assert caught.value.field == field


def test_a_steps_points_are_scaled_from_the_declared_space() -> None:
    click = env_pb2.Action(click=env_pb2.Click(at=env_pb2.Point(x=500, y=500)))
    request = step(actions=[click], coordinate_space=env_pb2.Size(width_px=1000, height_px=1000))
    result = step_command(request, screen_px=(1280, 800))
    assert result.actions == (Click(640, 400),)


def test_a_step_without_a_declared_space_is_in_guest_pixels() -> None:
    request = step()
    result = step_command(request, screen_px=None)
    assert (result.actions, result.settle, result.fingerprint) == ((Done(),), None, fingerprint_of(request))


def _observation_with(field: str, value: int) -> env_pb2.ObservationOptions:
    """A message from a newer client, with an enum value that this release does not have."""
    message = env_pb2.ObservationOptions()
    setattr(message, field, value)
    return message


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (_observation_with("encoding", 99), "observation.encoding"),
        (_observation_with("cursor", 99), "observation.cursor"),
        (_observation_with("a11y_format", 99), "observation.a11y_format"),
    ],
)
def test_an_option_of_a_later_release_is_refused_and_never_ignored(
    options: env_pb2.ObservationOptions, word: str
) -> None:
    with pytest.raises(Unimplemented, match=word):
        observation_options(options, "observation")


def test_screen_changes_can_be_requested_only_in_steps() -> None:
    message = env_pb2.ObservationOptions(include_grey_difference=True)
    options = observation_options(message, "observation", of_step=True)
    assert (options.include_screen_change, options.include_grey_difference) == (True, True)
    with pytest.raises(InvalidRequest, match=r"observation\.include_screen_change"):
        observation_options(message, "observation")


def test_image_sizes_for_a_model_are_converted() -> None:
    message = env_pb2.ObservationOptions(max_pixel_count=1_003_520, size_multiple_px=32)
    options = observation_options(message, "observation")
    assert (options.max_pixel_count, options.size_multiple_px) == (1_003_520, 32)


def test_ignored_regions_are_converted_and_limited() -> None:
    rect = env_pb2.Rect(x_px=1, y_px=2, width_px=3, height_px=4)
    policy = settle_policy(env_pb2.SettlePolicy(ignored_regions=[rect]), "settle")
    assert policy.ignored_regions == (Region(x_px=1, y_px=2, width_px=3, height_px=4),)
    with pytest.raises(InvalidRequest, match=r"settle\.ignored_regions\[0\]\.width_px"):
        settle_policy(env_pb2.SettlePolicy(ignored_regions=[env_pb2.Rect()]), "settle")
    with pytest.raises(InvalidRequest, match="at most 64"):
        settle_policy(env_pb2.SettlePolicy(ignored_regions=[rect] * 65), "settle")


@pytest.mark.parametrize(
    ("request_message", "word"),
    [
        (env_pb2.StreamFramesRequest(), "episode_id"),
        (env_pb2.StreamFramesRequest(episode_id="e", max_rate_hz=61), "max_rate_hz"),
        (env_pb2.StreamFramesRequest(episode_id="e", max_rate_hz=-1), "max_rate_hz"),
        (
            env_pb2.StreamFramesRequest(episode_id="e", observation=env_pb2.ObservationOptions(include_terminal=True)),
            "only pixels",
        ),
    ],
)
def test_the_fields_of_a_frame_stream_are_validated(request_message: env_pb2.StreamFramesRequest, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        frames_request(request_message)


def test_a_frame_stream_has_a_default_rate() -> None:
    assert frames_request(env_pb2.StreamFramesRequest(episode_id="e")) == ("e", ObservationOptions(), 10)


def test_a_long_minimum_raises_the_default_maximum() -> None:
    assert settle_policy(env_pb2.SettlePolicy(min=seconds(20)), "settle") == SettlePolicy(
        idle_ms=0, min_ms=20_000, max_ms=20_000
    )


def test_equal_requests_have_equal_fingerprints_and_others_do_not() -> None:
    assert fingerprint_of(step()) == fingerprint_of(step())
    assert fingerprint_of(step()) != fingerprint_of(step(step_index=1))


def test_keep_alive_takes_each_id_once_in_order() -> None:
    assert keep_alive_of(env_pb2.KeepAliveRequest(episode_ids=["ep-1"])) == (["ep-1"], None)
    assert keep_alive_of(env_pb2.KeepAliveRequest(episode_ids=["ep-2", "ep-1", "ep-2"])) == (["ep-2", "ep-1"], None)


@pytest.mark.parametrize("path", ["/home/user/notes.txt", r"C:\Users\user\notes.txt", "C:/Users"])
def test_an_absolute_path_of_either_system_is_accepted(path: str) -> None:
    assert guest_path_of(path) == path


def test_task_ids_are_deduplicated_and_limited() -> None:
    assert task_ids_of(["a/b", "a/b?seed=1", "a/b"]) == ("a/b", "a/b?seed=1")
    with pytest.raises(InvalidRequest, match=r"1001 .* 1000"):
        task_ids_of(["a/b"] * 1001)
