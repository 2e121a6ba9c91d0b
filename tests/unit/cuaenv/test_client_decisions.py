"""Decisions of the client alone: retries, the proto form of actions, the contents of observations."""

import io
import pickle
import re
import traceback
from datetime import UTC, datetime, timedelta
from types import FunctionType

import pytest
from PIL import Image

from cuaenv import client
from cuaenv.client import (
    BadRequest,
    DeadlineExceeded,
    EnvError,
    MachineLost,
    Observation,
    PoolExhausted,
    RetryPolicy,
    SampleVoid,
    State,
    Unavailable,
)
from cuaenv.client.placement import retry_pause_s
from cuaenv.client.results import read_episode, read_step
from cuaenv.v1 import env_pb2

POLICY = RetryPolicy(first_pause=timedelta(seconds=1), max_pause=timedelta(seconds=5))


@pytest.mark.parametrize("kind", [Unavailable, DeadlineExceeded])
@pytest.mark.parametrize(("attempt", "bound_s"), [(0, 1.0), (1, 2.0), (2, 4.0), (3, 5.0), (10_000, 5.0)])
def test_pauses_double_up_to_their_bound(kind: type[EnvError], attempt: int, bound_s: float) -> None:
    pauses_s = [retry_pause_s(kind("x"), attempt=attempt, policy=POLICY, jitter=jitter) for jitter in (0.0, 0.5)]
    assert pauses_s == [0.0, bound_s / 2]


def test_a_retry_waits_at_least_as_long_as_the_service_suggests() -> None:
    error = PoolExhausted("x", retry_after=timedelta(seconds=7))
    assert retry_pause_s(error, attempt=5, policy=POLICY, jitter=0.0) == 7.0
    assert retry_pause_s(error, attempt=5, policy=POLICY, jitter=0.5) == 7.5


@pytest.mark.parametrize("error", [BadRequest("x"), MachineLost("x"), PoolExhausted("x")])
def test_an_error_that_a_retry_cannot_fix_is_not_retried(error: EnvError) -> None:
    assert retry_pause_s(error, attempt=0, policy=POLICY, jitter=0.5) is None


def test_the_errors_are_families_and_few_leaves_and_the_documentation_draws_them_all() -> None:
    errors = [kind for name in client.__all__ if isinstance(kind := getattr(client, name), type)]
    errors = [kind for kind in errors if issubclass(kind, EnvError)]
    assert all(len(kind.__mro__) - len(EnvError.__mro__) <= 2 for kind in errors), "at most a family and a leaf"
    assert len([kind for kind in errors if kind.__base__ is EnvError]) == 10
    family, drawn = "", {"EnvError": "Exception"}
    for branch, entry in re.findall(r"^(.*[├└]── )(.*)$", client.__doc__ or "", re.MULTILINE):
        names = re.split(r", ", re.split(r"  +", entry)[0])
        family = names[0] if len(branch) == 4 else family
        drawn |= dict.fromkeys(names, "EnvError" if len(branch) == 4 else family)
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in errors if kind.__base__}


def test_every_name_of_the_client_is_shown_by_its_path() -> None:
    named = [thing for name in client.__all__ if isinstance(thing := getattr(client, name), type | FunctionType)]
    assert len(named) > 80
    shared = {"cuaenv.actions", "cuaenv.results"}
    assert {thing.__module__ for thing in named} == {"cuaenv.client", *shared}, "the service imports no client"
    assert traceback.format_exception_only(MachineLost("x")) == ["cuaenv.client.MachineLost: x\n"]


def test_a_state_that_is_newer_than_the_client_counts_as_failed() -> None:
    newer = env_pb2.Episode(state=99)  # type: ignore[arg-type]
    assert read_episode(newer, "h").state is State.FAILED
    step = env_pb2.StepResponse(episode=newer)
    assert read_step(step, observation(None)).state is State.FAILED


def test_an_error_can_be_pickled() -> None:
    error = MachineLost(
        "machine m1 died",
        code="DATA_LOSS",
        reason="MACHINE_LOST",
        metadata={"episode_id": "ep-1"},
        retry_after=timedelta(seconds=1),
        field="x",
    )
    revived = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
    assert type(revived) is MachineLost
    assert isinstance(revived, SampleVoid)
    assert (str(revived), revived.__dict__) == (str(error), error.__dict__)


def observation(encoding: str | None) -> Observation:
    buffer = io.BytesIO()
    if encoding is not None:
        Image.new("RGB", (4, 2), (255, 0, 0)).save(buffer, encoding)
    return Observation(
        frame_id="f1",
        width_px=4,
        height_px=2,
        screen_width_px=1280,
        screen_height_px=800,
        capture_time=datetime(2026, 1, 1, tzinfo=UTC),
        data=buffer.getvalue(),
    )


def test_an_image_is_available_as_bytes_as_a_picture_and_as_an_array() -> None:
    seen = observation("PNG")
    assert seen.png == seen.data
    assert seen.image.size == (4, 2)
    assert seen.image is seen.image
    assert seen.rgb_HWC.shape == (2, 4, 3)
    assert seen.rgb_HWC.dtype == "uint8"
    assert seen.rgb_HWC[0, 0].tolist() == [255, 0, 0]
    assert observation("JPEG").png.startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"View\(encoding='raw'\)"):
        _ = observation(None).image
