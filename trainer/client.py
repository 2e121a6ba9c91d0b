"""The client of `CUAEnv`: desktops to act on, with deadlines, exactly-once steps and typed errors.

```python
from trainer.client import Click, Done, EnvClient, PressKeys, TypeText

with EnvClient("127.0.0.1:50051") as client, client.reset("desktop/note-hello") as episode:
    print(episode.instruction)
    step = episode.step(Click(x=640, y=400), TypeText("Hello"), PressKeys(["ctrl", "s"]))
    step.observation.image.save("screen.png")
    episode.step(Done())
    print(episode.evaluate().score)
```

`AsyncEnvClient` is the same with `async with` and `await`, for many episodes at once. `reset_group` opens a group that
begins in one state, and `fork` branches an episode where it stands.

Every call has a deadline. A call that the network loses is made again under the same request id until then, so the
service performs it once; actions are never repeated. While an episode is open its lease is kept, however long a model
thinks; leaving the block closes it, and if this process dies the lease lapses by itself.

A daemon that asks for a token gets it from `token=`, or from the variable `ENVD_TOKEN`; `tls=Tls(ca=Path("ca.pem"))`
encrypts the connection. A token never travels to another host in clear text.

What the agent does wrong is in `StepResult.errors`. What goes wrong otherwise is an `EnvError`:

```text
EnvError
├── BadRequest            a field is wrong; fix the caller
├── NotFound              EpisodeNotFound, TaskNotFound, PoolNotFound
├── EpisodeEnded          the episode takes no more steps
├── GroupTooLarge         the pool, or the run's quota, can never hold that many
├── GuestRefused          the guest cannot do that; the episode is unharmed
├── NotForkable           the episode cannot be branched where it stands; it is unharmed
├── StepIndexMismatch     someone else stepped; abandon the episode
├── Unauthenticated       the daemon wants a token, and not this one
├── AccessDenied          switched off for this pool
│   └── ScopeTooSmall     the token is for other calls
├── NotSupported          not in the daemon's release
├── MessageTooLarge       more than 64 MiB in one message
├── PoolExhausted         no machine came free before the deadline
├── RateLimited           more calls than the token may make, up to the deadline
├── Unavailable           the daemon could not be reached before the deadline
│   ├── Draining          it is stopping; try another host
│   └── PoolFailing       the pool's machines do not start; the message says why
├── DeadlineExceeded      no answer before the deadline
└── SampleVoid            a fault of the service: never train on the episode
    ├── MachineLost, GuestUnresponsive, GuestFailed, SetupFailed, EvaluatorFailed
    └── ServiceFault      anything else; report it
```
"""

import asyncio
import io
import logging
import random
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack

import grpc
from cuaenv.v1 import env_pb2, env_pb2_grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from trainer.security import Access
from trainer.security import Tls as Tls  # noqa: PLC0414 -- exported

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from cuaenv.v1.env_pb2_grpc import CUAEnvAsyncStub
    from PIL import Image

    from trainer.frames import TiledImage

_logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Result = TypeVar("Result")

_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A proxy that is set for other traffic must not see ours: environments are near, and streams outlive its patience.
    ("grpc.enable_http_proxy", 0),
    # A connection that died without a word is found within 30 s, and then the call is made again.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # grpc's own pause grows to two minutes, long after a daemon is back.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
_CLOSE_TIMEOUT = timedelta(seconds=20)


# -- errors -----------------------------------------------------------------------------------------------------


class EnvError(Exception):
    """Base of all failures of a call. Can be pickled, so it survives the way between worker processes."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: timedelta | None = None,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        """Name of the gRPC status code."""
        self.reason = reason
        """Stable UPPER_SNAKE cause; empty where the failure did not come from the service itself."""
        self.metadata = dict(metadata or {})
        """What it is about, such as `episode_id`."""
        self.retry_after = retry_after
        """When the service thinks that another try makes sense; None if it does not."""
        self.field = field
        """The request's wrong field, for `BadRequest`."""

    def __reduce__(self) -> tuple[Callable[..., "EnvError"], tuple[Any, ...]]:
        return _revived, (type(self), str(self), self.__dict__)


def _revived(kind: type[EnvError], message: str, attributes: dict[str, Any]) -> EnvError:
    return kind(message, **attributes)


class BadRequest(EnvError):
    """A request's field is missing, malformed or out of range; the episode is unharmed."""


class NotFound(EnvError):
    """The named thing does not exist."""


class EpisodeNotFound(NotFound):
    """Closed, or its lease lapsed."""


class TaskNotFound(NotFound):
    """No such task."""


class PoolNotFound(NotFound):
    """No such pool."""


class EpisodeEnded(EnvError):
    """The episode takes no more steps; it may still be evaluated."""


class GroupTooLarge(EnvError):
    """The pool can never hold a group of this size."""


class GuestRefused(EnvError):
    """The guest answered that it cannot; the episode is unharmed."""


class NotForkable(EnvError):
    """The episode's machine has something that a copy cannot have too; the episode goes on."""


class StepIndexMismatch(EnvError):
    """The episode is not where this client thinks it is; abandon it."""


class Unauthenticated(EnvError):
    """The daemon wants a token and got none, or one that it does not know."""


class AccessDenied(EnvError):
    """The pool does not allow this call."""


class ScopeTooSmall(AccessDenied):
    """The token's scope does not cover this call."""


class NotSupported(EnvError):
    """Not in the daemon's release."""


class MessageTooLarge(EnvError):
    """A message of more than 64 MiB."""


class PoolExhausted(EnvError):
    """No machine came free before the deadline."""


class RateLimited(EnvError):
    """The token makes more calls than it may. This one did nothing."""


class Unavailable(EnvError):
    """The daemon could not be reached before the deadline."""


class Draining(Unavailable):
    """The daemon is stopping; another host will do."""


class PoolFailing(Unavailable):
    """The pool's machines do not start, and did not until the deadline; another pool or host may do."""


class DeadlineExceeded(EnvError):
    """No answer before the deadline. What was begun goes on at the service."""


class SampleVoid(EnvError):
    """A fault that is not the agent's: never train on the episode."""


class MachineLost(SampleVoid):
    """The episode's machine died."""


class GuestUnresponsive(SampleVoid):
    """The episode's guest hangs."""


class GuestFailed(SampleVoid):
    """The episode's guest failed at what it must do."""


class SetupFailed(SampleVoid):
    """The task's setup did not complete, so no episode was opened."""


class EvaluatorFailed(SampleVoid):
    """A checker broke, so there is no score."""


class ServiceFault(SampleVoid):
    """Anything else that the service is to blame for."""


_BY_REASON: Mapping[str, type[EnvError]] = {
    "EPISODE_NOT_FOUND": EpisodeNotFound,
    "TASK_NOT_FOUND": TaskNotFound,
    "POOL_NOT_FOUND": PoolNotFound,
    "EPISODE_ENDED": EpisodeEnded,
    "GROUP_TOO_LARGE": GroupTooLarge,
    "GUEST_REFUSED": GuestRefused,
    "NOT_FORKABLE": NotForkable,
    "SCOPE_TOO_SMALL": ScopeTooSmall,
    "POOL_EXHAUSTED": PoolExhausted,
    "RATE_LIMITED": RateLimited,
    "POOL_FAILING": PoolFailing,
    "DRAINING": Draining,
    "MACHINE_LOST": MachineLost,
    "GUEST_UNRESPONSIVE": GuestUnresponsive,
    "GUEST_ERROR": GuestFailed,
    "SETUP_FAILED": SetupFailed,
    "EVALUATOR_FAILED": EvaluatorFailed,
}
#: For reasons that are newer than this client, and for failures of gRPC itself, which have none.
_BY_CODE: Mapping[grpc.StatusCode, type[EnvError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ABORTED: StepIndexMismatch,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.UNIMPLEMENTED: NotSupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MessageTooLarge,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: SampleVoid,
    grpc.StatusCode.INTERNAL: ServiceFault,
    grpc.StatusCode.UNKNOWN: ServiceFault,
}


def error_of(failure: grpc.aio.AioRpcError) -> EnvError:
    """Return the typed error for a failed call."""
    code, reason, wrong_field = failure.code(), "", ""
    metadata: dict[str, str] = {}
    retry_after: timedelta | None = None
    status = rpc_status.from_call(failure)  # type: ignore[arg-type]
    for detail in status.details if status is not None else ():
        info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta()
        elif detail.Unpack(bad) and bad.field_violations:
            wrong_field = bad.field_violations[0].field
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, EnvError)
    return kind(
        failure.details() or code.name,
        code=code.name,
        reason=reason,
        metadata=metadata,
        retry_after=retry_after,
        field=wrong_field,
    )


# -- what an agent does -----------------------------------------------------------------------------------------

Button = Literal["left", "middle", "right"]

_BUTTONS: Mapping[Button, "env_pb2.Button.ValueType"] = {
    "left": env_pb2.BUTTON_LEFT,
    "middle": env_pb2.BUTTON_MIDDLE,
    "right": env_pb2.BUTTON_RIGHT,
}


@dataclass(frozen=True, slots=True)
class Move:
    """Move the pointer."""

    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Click:
    """Press and release a button; without a place, where the pointer is."""

    x: int | None = None
    y: int | None = None
    button: Button = "left"
    count: int = 1
    modifiers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Drag:
    """Press at the start (without one, where the pointer is), move to the end, release."""

    end_x: int
    end_y: int
    start_x: int | None = None
    start_y: int | None = None
    button: Button = "left"
    modifiers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class MouseDown:
    """Press a button and keep it down."""

    button: Button = "left"
    x: int | None = None
    y: int | None = None


@dataclass(frozen=True, slots=True)
class MouseUp:
    """Release a button."""

    button: Button = "left"
    x: int | None = None
    y: int | None = None


@dataclass(frozen=True, slots=True)
class Scroll:
    """Turn the wheel: positive `dy` scrolls down, positive `dx` right, in wheel clicks."""

    dy: int = 0
    dx: int = 0
    x: int | None = None
    y: int | None = None
    modifiers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TypeText:
    """Type Unicode text; newline is Enter, tab is Tab."""

    text: str


@dataclass(frozen=True, slots=True)
class PressKeys:
    """Press keys together, such as `["ctrl", "s"]`, and release them."""

    keys: Sequence[str]
    hold: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class KeyDown:
    """Press a key and keep it down."""

    key: str


@dataclass(frozen=True, slots=True)
class KeyUp:
    """Release a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Let guest time pass."""

    duration: timedelta


@dataclass(frozen=True, slots=True)
class Done:
    """Declare the task done, with an answer if it asked a question."""

    answer: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Declare the task infeasible."""

    explanation: str = ""


Action = (
    Move | Click | Drag | MouseDown | MouseUp | Scroll | TypeText | PressKeys | KeyDown | KeyUp | Wait | Done | Fail
)


def _wire_action(action: Action) -> env_pb2.Action:
    match action:
        case Move():
            return env_pb2.Action(move=env_pb2.Move(to=_wire_point(action.x, action.y)))
        case Click():
            click = env_pb2.Click(
                at=_wire_point(action.x, action.y),
                button=_BUTTONS[action.button],
                count=action.count,
                modifiers=action.modifiers,
            )
            return env_pb2.Action(click=click)
        case Drag():
            drag = env_pb2.Drag(
                start=_wire_point(action.start_x, action.start_y),
                end=_wire_point(action.end_x, action.end_y),
                button=_BUTTONS[action.button],
                modifiers=action.modifiers,
            )
            return env_pb2.Action(drag=drag)
        case MouseDown():
            at = _wire_point(action.x, action.y)
            return env_pb2.Action(mouse_down=env_pb2.MouseDown(button=_BUTTONS[action.button], at=at))
        case MouseUp():
            at = _wire_point(action.x, action.y)
            return env_pb2.Action(mouse_up=env_pb2.MouseUp(button=_BUTTONS[action.button], at=at))
        case Scroll():
            at = _wire_point(action.x, action.y)
            scroll = env_pb2.Scroll(dy=action.dy, dx=action.dx, at=at, modifiers=action.modifiers)
            return env_pb2.Action(scroll=scroll)
        case TypeText():
            return env_pb2.Action(type_text=env_pb2.TypeText(text=action.text))
        case PressKeys():
            return env_pb2.Action(press_keys=env_pb2.PressKeys(keys=action.keys, hold=_wire_duration(action.hold)))
        case KeyDown():
            return env_pb2.Action(key_down=env_pb2.KeyDown(key=action.key))
        case KeyUp():
            return env_pb2.Action(key_up=env_pb2.KeyUp(key=action.key))
        case Wait():
            return env_pb2.Action(wait=env_pb2.Wait(duration=_wire_duration(action.duration)))
        case Done():
            return env_pb2.Action(done=env_pb2.Done(answer=action.answer))
        case Fail():
            return env_pb2.Action(fail=env_pb2.Fail(explanation=action.explanation))


def _wire_point(x: int | None, y: int | None) -> env_pb2.Point | None:
    if x is None and y is None:
        return None
    if x is None or y is None:
        raise ValueError(f"a place needs both x and y, or neither; got x={x} y={y}")
    return env_pb2.Point(x=x, y=y)


def _wire_duration(length: timedelta | None) -> Duration | None:
    if length is None:
        return None
    duration = Duration()
    duration.FromTimedelta(length)
    return duration


# -- how it looks, and what it sees -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """When a screen counts as settled after input."""

    quiet: timedelta = timedelta(milliseconds=300)
    """The screen must not have changed for this long."""
    min: timedelta = timedelta(0)
    """Never sooner than this after the last input."""
    max: timedelta = timedelta(seconds=5)
    """No later than this, even if the screen still moves."""
    ignored: Sequence[tuple[int, int, int, int]] = ()
    """Parts (x, y, width, height) of the screen whose changes do not count, such as a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What to put into an observation."""

    encoding: Literal["raw", "png", "jpeg", "webp", "none"] = "raw"
    """How pixels travel. `raw` is lossless and the fastest: only what changed since the last observation is sent, and
    put together here. `jpeg` and `webp` are lossy."""
    quality: int = 85
    """For JPEG and WebP, 1 to 100."""
    region: tuple[int, int, int, int] | None = None
    """Crop to (x, y, width, height), in pixels of the screen."""
    max_width_px: int = 0
    """Scale down to fit; 0 for no limit."""
    max_height_px: int = 0
    max_pixel_count: int = 0
    """Scale down to at most so many pixels; 0 for no limit."""
    size_multiple_px: int = 0
    """Make width and height multiples of this. With the factor and pixel limit of a vision model's image processor, the
    image is as the processor would resize it."""
    a11y_tree: bool = False
    """Tell what the guest's programs say is on the screen, as text: `Observation.a11y_tree`."""
    a11y_format: Literal["compact", "osworld_xml"] = "compact"
    """`compact`: an outline, one element a line with role, name, value, states and box. `osworld_xml`: OSWorld's."""
    a11y_max_chars: int = 0
    """Longest outline; it ends between elements and says how many it leaves out. 0 for the daemon's default."""
    a11y_elements: bool = False
    """The same one by one, as `Observation.a11y_elements`."""
    marks: bool = False
    """Draw a numbered box around all that can be clicked or typed into; `a11y_elements` tell the numbers."""
    terminal: bool = False
    cursor: Literal["drawn", "hidden", "reported"] = "drawn"
    """`reported`: left out of the pixels, and told as `Observation.cursor`."""
    screen_change: bool = False
    """For steps: what they changed on the screen, as `StepResult.screen_change`."""
    grey_difference: bool = False
    """For steps: the mean difference in grey as well, which takes some 10 ms."""


_ENCODINGS: Mapping[str, "env_pb2.Encoding.ValueType"] = {
    "raw": env_pb2.ENCODING_RAW_ZSTD,
    "none": env_pb2.ENCODING_NONE,
    "png": env_pb2.ENCODING_PNG,
    "jpeg": env_pb2.ENCODING_JPEG,
    "webp": env_pb2.ENCODING_WEBP,
}
_A11Y_FORMATS: Mapping[str, "env_pb2.A11yFormat.ValueType"] = {
    "compact": env_pb2.A11Y_FORMAT_COMPACT,
    "osworld_xml": env_pb2.A11Y_FORMAT_OSWORLD_XML,
}
_CURSORS: Mapping[str, "env_pb2.CursorMode.ValueType"] = {
    "drawn": env_pb2.CURSOR_MODE_DRAWN,
    "hidden": env_pb2.CURSOR_MODE_HIDDEN,
    "reported": env_pb2.CURSOR_MODE_REPORTED,
}


def _wire_settle(settle: Settle | None) -> env_pb2.SettlePolicy | None:
    if settle is None:
        return None
    return env_pb2.SettlePolicy(
        quiet=_wire_duration(settle.quiet),
        min=_wire_duration(settle.min),
        max=_wire_duration(settle.max),
        ignored_regions=[_wire_rect(region) for region in settle.ignored],
    )


def _wire_view(view: View, *, known: "Observation | None" = None, of_step: bool = False) -> env_pb2.ObservationOptions:
    return env_pb2.ObservationOptions(
        encoding=_ENCODINGS[view.encoding],
        quality=view.quality,
        region=None if view.region is None else _wire_rect(view.region),
        max_width_px=view.max_width_px,
        max_height_px=view.max_height_px,
        max_pixel_count=view.max_pixel_count,
        size_multiple_px=view.size_multiple_px,
        cursor=_CURSORS[view.cursor],
        a11y_format=_A11Y_FORMATS[view.a11y_format] if view.a11y_tree else env_pb2.A11Y_FORMAT_UNSPECIFIED,
        a11y_max_chars=view.a11y_max_chars,
        include_a11y_elements=view.a11y_elements,
        draw_marks=view.marks,
        include_terminal=view.terminal,
        include_screen_change=view.screen_change and of_step,
        include_grey_difference=view.grey_difference and of_step,
        known_image_id=known.image_id if known is not None and known.tiles is not None else "",
    )


def _wire_rect(region: tuple[int, int, int, int]) -> env_pb2.Rect:
    x_px, y_px, width_px, height_px = region
    return env_pb2.Rect(x_px=x_px, y_px=y_px, width_px=width_px, height_px=height_px)


def _box(rect: env_pb2.Rect) -> tuple[int, int, int, int]:
    return rect.x_px, rect.y_px, rect.width_px, rect.height_px


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """Something on the screen, as its program tells of it: the guest's word, never to be trusted."""

    role: str
    """What it is, such as `push-button`."""
    name: str
    value: str
    """Its text or number, where that is not its name."""
    states: tuple[str, ...]
    """Such as `focused`, `checked`, `disabled`."""
    box: tuple[int, int, int, int]
    """Left, top, width and height of what is on the screen, in pixels of the screen."""
    depth: int
    """Elements that it lies in; 0 for a window."""
    mark: int
    """The number that `View.marks` drew; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the agent sees. What was not asked for is None, never a blank stand-in."""

    frame_id: str
    """Names the pixels of the whole screen: frames with equal ids look the same, in any episode."""
    width_px: int
    """Size of the image, after crop and scaling."""
    height_px: int
    screen_width_px: int
    screen_height_px: int
    capture_time: datetime
    """Timezone-aware, by the host's clock."""
    image_id: str = ""
    """Names the pixels of the image: what was rebuilt here was checked against it. Empty without pixels."""
    data: bytes = field(default=b"", repr=False)
    """The image as it came, where it is a PNG, JPEG or WebP; else empty."""
    tiles: "TiledImage | None" = field(default=None, repr=False)
    """The exact image, put together from what came, for `View(encoding="raw")`."""
    cursor: tuple[int, int] | None = None
    """Where the pointer is, in pixels of the screen, for `View(cursor="reported")`."""
    a11y_tree: str | None = field(default=None, repr=False)
    """What programs say is on the screen, as `View.a11y_format` asked for it."""
    a11y_elements: tuple[Element, ...] | None = field(default=None, repr=False)
    """The same one by one, for `View.a11y_elements` and `View.marks`: each element before those in it, and the window
    in use first."""
    a11y_left_out_count: int = 0
    """Elements that were too many to tell."""
    terminal: str | None = field(default=None, repr=False)
    settled: bool | None = None
    """False when the screen still moved at `Settle.max`; None where nothing waited for it."""
    settle_ms: float = 0.0
    moving: tuple[tuple[int, int, int, int], ...] = ()
    """Parts (x, y, width, height) of the screen that still moved at `Settle.max`."""
    timings_ms: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def image(self) -> "Image.Image":
        """The image for Pillow, made once. Raises: ValueError if there are no pixels."""
        from PIL import Image  # noqa: PLC0415 -- who only wants bytes needs no Pillow

        if self.tiles is not None:
            return Image.fromarray(self.rgb_HWC)
        if not self.data:
            raise ValueError(
                f"frame {self.frame_id} came without pixels; ask for them with View(encoding='raw')."
                " An answer that a daemon recorded before it was restarted may have none"
            )
        return Image.open(io.BytesIO(self.data)).convert("RGB")

    @cached_property
    def rgb_HWC(self) -> "npt.NDArray[np.uint8]":  # noqa: N802 -- the array's axes
        """The image as (height, width, 3) 8-bit RGB, made once. Raises: ValueError if there are no pixels."""
        import numpy as np  # noqa: PLC0415 -- who only wants bytes needs no numpy

        return np.asarray(self.image, dtype=np.uint8) if self.tiles is None else self.tiles.rgb_HWC()

    def element_at(self, x: int, y: int) -> Element | None:
        """Return the innermost element at a pixel of the screen, in the frontmost window that has one there.

        None where there is none, and where no elements were asked for.
        """
        found: Element | None = None
        for element in self.a11y_elements or ():
            if element.depth == 0 and found is not None:
                break
            left, top, width, height = element.box
            if left <= x < left + width and top <= y < top + height:
                found = element
        return found

    @property
    def png(self) -> bytes:
        """The image as PNG, encoded here if it came otherwise. Raises: ValueError if there are no pixels."""
        if self.data.startswith(b"\x89PNG"):
            return self.data
        buffer = io.BytesIO()
        self.image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()


class State(Enum):
    """Where an episode is in its life."""

    #: Accepts steps.
    ACTIVE = "active"
    #: The agent said done or fail, or the task reached a terminal state.
    TERMINATED = "terminated"
    #: Cut off by a limit or by an evaluation; not terminal in the task.
    TRUNCATED = "truncated"
    #: Lost to a fault of the service; void for training.
    FAILED = "failed"


_STATES: Mapping["env_pb2.Episode.State.ValueType", State] = {
    env_pb2.Episode.STATE_ACTIVE: State.ACTIVE,
    env_pb2.Episode.STATE_TERMINATED: State.TERMINATED,
    env_pb2.Episode.STATE_TRUNCATED: State.TRUNCATED,
    env_pb2.Episode.STATE_FAILED: State.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenChange:
    """What a step changed on the screen, as facts for rewards."""

    base_frame_id: str
    """What the screen showed when the step began."""
    changed_fraction: float
    """Share of pixels that differ, in [0, 1]."""
    changed_regions: tuple[tuple[int, int, int, int], ...]
    """Parts (x, y, width, height) around all that differs."""
    grey_difference: float | None
    """Mean absolute difference in 64x64 grey, in [0, 1], where `View.grey_difference` asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did."""

    observation: Observation
    errors: tuple[str, ...]
    """One for each action performed: why it failed, in words fit for the agent; empty when it did not."""
    state: State
    end_reason: str
    """Why the episode ended, such as AGENT_DONE or MAX_STEPS; empty while it is active."""
    step_count: int
    timings_ms: Mapping[str, float]
    screen_change: "ScreenChange | None"
    """What changed on the screen, where `View.screen_change` or `View.grey_difference` asked for it."""
    replayed: bool
    """The answer was recorded earlier: a try before this one had been performed."""

    @property
    def done(self) -> bool:
        """The episode takes no more steps."""
        return self.state is not State.ACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One checker's verdict."""

    name: str
    score: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An episode's score, in [0, 1]."""

    score: float
    checks: tuple[Check, ...]
    timings_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command in a guest did."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something that can be attempted."""

    task_id: str
    instruction: str
    level: int
    suite: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an episode's first state came from. Equal origins prove that episodes began in the same state."""

    template_digest: str
    """Of the frozen machine that its machine was forked from."""
    overlay_parent: str
    """Of the disk that its machine's overlay stands on."""
    first_frame_id: str
    """What the agent saw first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A set of interchangeable machines, as it is now."""

    name: str
    image: str
    accelerator: str
    capacity: int
    idle_count: int
    leased_count: int
    waiting_count: int
    problem: str
    """Why machines fail to start; empty when they do not."""


def _observation(message: env_pb2.Observation, base: Observation | None = None) -> Observation:
    """Return what an agent sees; `base` is what the service was told that we have."""
    settle = message.settle
    return _seen(
        message.frame,
        base,
        a11y_tree=message.a11y_tree if message.HasField("a11y_tree") else None,
        a11y_elements=_elements(message.a11y_elements) if message.HasField("a11y_elements") else None,
        a11y_left_out_count=message.a11y_elements.left_out_count,
        terminal=message.terminal if message.HasField("terminal") else None,
        settled=settle.settled if message.HasField("settle") else None,
        settle_ms=settle.settle_ms,
        moving=tuple(_box(rect) for rect in settle.moving_regions),
        timings_ms=dict(message.timings_ms),
    )


def _elements(message: env_pb2.A11yElements) -> tuple[Element, ...]:
    return tuple(
        Element(
            role=element.role,
            name=element.name,
            value=element.value,
            states=tuple(element.states),
            box=_box(element.box),
            depth=element.depth,
            mark=element.mark,
        )
        for element in message.elements
    )


def _seen(frame: env_pb2.Frame, base: Observation | None, **more: Any) -> Observation:
    encoding = frame.keyframe.encoding
    return Observation(
        frame_id=frame.frame_id,
        width_px=frame.width_px,
        height_px=frame.height_px,
        screen_width_px=frame.screen.width_px,
        screen_height_px=frame.screen.height_px,
        capture_time=frame.capture_time.ToDatetime(tzinfo=UTC),
        image_id=frame.image_id,
        data=b"" if encoding == env_pb2.ENCODING_RAW_ZSTD else frame.keyframe.data,
        tiles=_tiles(frame, base.tiles if base else None),
        cursor=(frame.cursor.x, frame.cursor.y) if frame.HasField("cursor") else None,
        **more,
    )


def _tiles(frame: env_pb2.Frame, base: "TiledImage | None") -> "TiledImage | None":
    kind = frame.WhichOneof("content")
    if kind is None or (kind == "keyframe" and frame.keyframe.encoding != env_pb2.ENCODING_RAW_ZSTD):
        return None
    try:
        from trainer.frames import FrameMismatch, TiledImage  # noqa: PLC0415 -- who wants PNGs needs no numpy
    except ImportError as error:
        raise ImportError(
            f"{error.name} is missing: install envd-trainer[trainer], or ask for View(encoding='png')", name=error.name
        ) from error
    try:
        if kind == "keyframe":
            return TiledImage.unpack(
                frame.keyframe.data, width_px=frame.width_px, height_px=frame.height_px, image_id=frame.image_id
            )
        if base is not None and kind == "unchanged" and frame.unchanged.base_image_id == base.image_id:
            return base
        if base is not None and kind == "tiles" and frame.tiles.base_image_id == base.image_id:
            boxes = [_box(rect) for rect in frame.tiles.tiles]
            return base.patched(boxes, frame.tiles.data, image_id=frame.image_id)
    except FrameMismatch as error:
        raise ServiceFault(str(error), code="DATA_LOSS", reason="FRAME_MISMATCH") from error
    raise ServiceFault(
        f"image {frame.image_id} came as {kind} of one that is not here", code="DATA_LOSS", reason="FRAME_MISMATCH"
    )


def _screen_change(response: env_pb2.StepResponse) -> ScreenChange | None:
    if not response.HasField("screen_change"):
        return None
    change = response.screen_change
    return ScreenChange(
        base_frame_id=change.base_frame_id,
        changed_fraction=change.changed_fraction,
        changed_regions=tuple(_box(rect) for rect in change.changed_regions),
        grey_difference=change.grey_difference if change.HasField("grey_difference") else None,
    )


# -- calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How calls are made again, always within their deadline and under the same request id."""

    attempt_timeout: timedelta = timedelta(seconds=60)
    """After so long without an answer the call is made again; the service joins it to the one that still runs."""
    first_pause: timedelta = timedelta(milliseconds=100)
    """Upper bound of the first pause; it doubles with each try."""
    max_pause: timedelta = timedelta(seconds=5)


def retry_pause_s(error: EnvError, *, attempt: int, policy: RetryPolicy, jitter: float) -> float | None:
    """Return how many seconds to wait before another try, or None where none can help.

    Args:
        error: What the last try met.
        attempt: How many tries failed before it.
        policy: Bounds of the pause.
        jitter: Random in [0, 1), so that clients who failed together do not come back together.
    """
    if error.retry_after is not None:
        return error.retry_after.total_seconds() + jitter * policy.first_pause.total_seconds()
    if isinstance(error, Unavailable | DeadlineExceeded):
        # Exponents beyond this change nothing, and would overflow.
        bound_s = policy.first_pause.total_seconds() * 2.0 ** min(attempt, 30)
        return jitter * min(bound_s, policy.max_pause.total_seconds())
    return None


class _StepOptions(TypedDict, total=False):
    coordinate_space: tuple[int, int] | None
    settle: Settle | None
    view: View | None
    timeout: timedelta


class _ResetOptions(TypedDict, total=False):
    pool: str
    max_steps: int
    lease_ttl: timedelta
    settle: Settle | None
    view: View
    coordinate_space: tuple[int, int] | None
    timeout: timedelta


class _ForkOptions(TypedDict, total=False):
    lease_ttl: timedelta
    view: View | None
    timeout: timedelta


class AsyncEnvClient:
    """Reaches one daemon. May be shared by tasks and by event loops; each loop gets a connection of its own."""

    def __init__(
        self,
        target: str,
        *,
        run: str = "",
        retry: RetryPolicy | None = None,
        keep_alive_interval: timedelta | None = None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Remember where the daemon is; the first call connects.

        Args:
            target: `HOST:PORT` or `unix:PATH`.
            run: Label of the training run, for fair share and metrics.
            retry: How lost calls are made again.
            keep_alive_interval: How often leases are renewed; by default three times in each.
            token: Shown with every call; by default the variable `ENVD_TOKEN`. Empty for none.
            tls: Files for an encrypted connection; None for clear text.

        Raises:
            ValueError: The token would travel to another host in clear text, or cannot be one.
        """
        self.target = target
        self._access = Access(token=token, tls=tls)
        self._access.check(target)
        self._run = run
        self._retry = retry or RetryPolicy()
        self._keep_alive_interval = keep_alive_interval
        # Each loop touches only its own entry, so threads need no lock; a loop that is gone takes its channel with it.
        self._channels: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, grpc.aio.Channel] = (
            weakref.WeakKeyDictionary()
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the running loop's connection. Idempotent; another call connects again."""
        channel = self._channels.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            await channel.close()

    @property
    def _stub(self) -> "CUAEnvAsyncStub":
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            channel = self._channels[loop] = self._access.open_channel(self.target, _CHANNEL_OPTIONS)
        stub: Any = self._access.authorised(env_pb2_grpc.CUAEnvStub(channel))
        return stub  # type: ignore[no-any-return]

    @asynccontextmanager
    async def reset(self, task: str, **options: Unpack[_ResetOptions]) -> AsyncIterator["AsyncEpisode"]:
        """Open one episode; options and errors are those of `reset_group`."""
        async with self.reset_group(task, size=1, **options) as episodes:
            yield episodes[0]

    @asynccontextmanager
    async def reset_group(
        self,
        task: str,
        *,
        size: int,
        pool: str = "",
        max_steps: int = 0,
        lease_ttl: timedelta = timedelta(minutes=5),
        settle: Settle | None = None,
        view: View = View(),
        coordinate_space: tuple[int, int] | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> AsyncIterator[Sequence["AsyncEpisode"]]:
        """Open episodes of one task, all or none, keep their leases, and close them on the way out.

        If this is cancelled while it waits, what the service had begun ends with its lease.

        Args:
            task: Id of the task.
            size: How many episodes.
            pool: Where; empty for the task's own.
            max_steps: Steps after which an episode is truncated; 0 for the task's own limit.
            lease_ttl: How long machines outlive this process, 10 s to 1 h.
            settle: When a screen counts as settled, for the first observation and as the steps' default.
            view: What observations hold, for the first one and as the steps' default.
            coordinate_space: (width, height) that actions' places refer to; None for pixels of the screen.
            timeout: How long admission and setup may take.

        Raises:
            EnvError: See the module's tree.
        """
        request = env_pb2.ResetRequest(
            request_id=_new_id(),
            task_id=task,
            pool=pool,
            group_size=size,
            lease_ttl=_wire_duration(lease_ttl),
            max_steps=max_steps,
            run=self._run,
            settle=_wire_settle(settle),
            observation=_wire_view(view),
            # Shorter than our own deadline, so that the service can still say what stood in the way.
            ready_timeout=_wire_duration(max(timeout - timedelta(seconds=1), timeout / 2)),
        )
        response = await self._call("Reset", request, timeout)
        episodes = [
            AsyncEpisode(
                self,
                info,
                _observation(observation),
                instruction=response.instruction,
                defaults=_StepOptions(settle=settle, view=view, coordinate_space=coordinate_space),
            )
            for info, observation in zip(response.episodes, response.observations, strict=True)
        ]
        async with self._kept(episodes, lease_ttl):
            yield episodes

    @asynccontextmanager
    async def fork(
        self,
        parent: "AsyncEpisode",
        *,
        count: int,
        lease_ttl: timedelta = timedelta(minutes=5),
        view: View | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> AsyncIterator[Sequence["AsyncEpisode"]]:
        """Branch an active episode: open copies that begin where it stands, all or none, and close them on the way out.

        The parent goes on, and the copies may outlive it. Their leases are kept meanwhile. If this is cancelled while
        it waits, what the service had begun ends with its lease.

        Args:
            parent: The episode; none of its steps may be running.
            count: How many copies.
            lease_ttl: How long their machines outlive this process, 10 s to 1 h.
            view: What their first observations hold; by default what the parent's reset said.
            timeout: How long admission and copying may take.

        Raises:
            NotForkable: It cannot be branched where it stands; it goes on.
            EnvError: See the module's tree.
        """
        request = env_pb2.ForkRequest(
            request_id=_new_id(),
            episode_id=parent.episode_id,
            step_index=parent.step_count,
            fork_count=count,
            lease_ttl=_wire_duration(lease_ttl),
            observation=_wire_view(parent._view(view), known=parent.observation),
        )
        seen = parent.observation
        response = await self._call("Fork", request, timeout)
        episodes = [
            AsyncEpisode(
                self,
                info,
                _observation(observation, seen),
                instruction=parent.instruction,
                defaults=parent._defaults,
            )
            for info, observation in zip(response.episodes, response.observations, strict=True)
        ]
        async with self._kept(episodes, lease_ttl):
            yield episodes

    async def list_tasks(self, *, suite: str = "", timeout: timedelta = timedelta(seconds=30)) -> list[Task]:
        """Return the tasks that can be attempted, in id order. Raises: EnvError."""
        tasks: list[Task] = []
        token = ""
        while True:
            request = env_pb2.ListTasksRequest(suite=suite, page_size=1000, page_token=token)
            response = await self._call("ListTasks", request, timeout)
            tasks += [
                Task(task_id=task.task_id, instruction=task.instruction, level=task.level, suite=task.suite)
                for task in response.tasks
            ]
            token = response.next_page_token
            if not token:
                return tasks

    async def list_pools(self, *, timeout: timedelta = timedelta(seconds=30)) -> list[Pool]:
        """Return the daemon's pools as they are now. Raises: EnvError."""
        response = await self._call("ListPools", env_pb2.ListPoolsRequest(), timeout)
        return [
            Pool(
                name=pool.name,
                image=pool.image,
                accelerator=pool.accelerator,
                capacity=pool.capacity_count,
                idle_count=pool.idle_count,
                leased_count=pool.leased_count,
                waiting_count=pool.waiting_count,
                problem=pool.problem,
            )
            for pool in response.pools
        ]

    async def _call(self, method: str, request: Any, timeout: timedelta, *, retry: bool = True) -> Any:
        """Call until there is an answer, an error that another try cannot mend, or no time left. Raises: EnvError."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout.total_seconds()
        attempt_s = self._retry.attempt_timeout.total_seconds() if retry else timeout.total_seconds()
        attempt = 0
        while True:
            try:
                call = getattr(self._stub, method)(request, timeout=min(attempt_s, deadline_s - loop.time()))
                return await call
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure)
                pause_s = retry_pause_s(error, attempt=attempt, policy=self._retry, jitter=random.random())  # noqa: S311
                left_s = deadline_s - loop.time()
                if not retry or pause_s is None or pause_s >= left_s:
                    raise error from failure
            # A slow answer is joined, which is no news; a daemon that cannot be reached is.
            is_news = attempt == 0 and not isinstance(error, DeadlineExceeded)
            level = logging.WARNING if is_news else logging.DEBUG
            _logger.log(
                level, "%s at %s: %s: %s; trying for %.0f s more", method, self.target, error.code, error, left_s
            )
            await asyncio.sleep(pause_s)
            attempt += 1

    @asynccontextmanager
    async def _kept(self, episodes: Sequence["AsyncEpisode"], lease_ttl: timedelta) -> AsyncIterator[None]:
        """Keep episodes' leases, and close them on the way out."""
        ids = [episode.episode_id for episode in episodes]
        keeper = asyncio.create_task(self._keep_leases(ids, lease_ttl), name=f"keep-leases:{ids[0]}")
        try:
            yield
        finally:
            keeper.cancel()
            await _finish(asyncio.gather(*(episode.close() for episode in episodes)))

    async def _keep_leases(self, episode_ids: Sequence[str], lease_ttl: timedelta) -> None:
        interval = self._keep_alive_interval or lease_ttl / 3
        request = env_pb2.KeepAliveRequest(episode_ids=episode_ids, lease_ttl=_wire_duration(lease_ttl))
        while True:
            await asyncio.sleep(interval.total_seconds())
            try:
                response = await self._call("KeepAlive", request, lease_ttl / 3)
            except EnvError as error:
                # The episode's own calls will say what is wrong, if it stays wrong.
                _logger.warning("episodes %s: lease not renewed: %s", ", ".join(episode_ids), error)
                continue
            if not response.episodes:
                return


class AsyncEpisode:
    """One attempt at one task on one machine. Its steps are made one after the other."""

    def __init__(
        self,
        client: AsyncEnvClient,
        info: env_pb2.Episode,
        observation: Observation,
        *,
        instruction: str,
        defaults: _StepOptions,
    ) -> None:
        self._client = client
        self._defaults = defaults
        self._closing: asyncio.Task[None] | None = None
        self.episode_id = info.episode_id
        self.group_id = info.group_id
        self.parent_episode_id = info.parent_episode_id
        """The episode that it was forked from; empty if none."""
        self.origin = Origin(
            template_digest=info.origin.template_digest,
            overlay_parent=info.origin.overlay_parent,
            first_frame_id=info.origin.first_frame_id,
        )
        """Where its first state came from."""
        self.task_id = info.task_id
        self.max_steps = info.max_steps
        self.instruction = instruction
        """What the agent is asked to do."""
        self.observation = observation
        """What it saw last."""
        self._note(info)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.episode_id} {self.task_id} {self.state.value} step {self.step_count}>"

    def _note(self, info: env_pb2.Episode) -> None:
        self.state = _STATES[info.state]
        self.end_reason = info.end_reason
        self.step_count = info.step_count

    async def step(
        self,
        *actions: Action,
        coordinate_space: tuple[int, int] | None = None,
        settle: Settle | None = None,
        view: View | None = None,
        timeout: timedelta = timedelta(minutes=3),
    ) -> StepResult:
        """Perform actions in order, wait for the screen to settle, and look.

        After an error that leaves open whether they were performed (`DeadlineExceeded`, `Unavailable`), abandon the
        episode: another step may meet `StepIndexMismatch`.

        Args:
            actions: At least one. `Done` and `Fail` end the episode.
            coordinate_space: (width, height) that places refer to; by default what the reset said.
            settle: By default what the reset said.
            view: By default what the reset said.
            timeout: For the answer, through all tries.

        Raises:
            EnvError: See the module's tree.
        """
        space = coordinate_space or self._defaults["coordinate_space"]
        request = env_pb2.StepRequest(
            request_id=_new_id(),
            episode_id=self.episode_id,
            step_index=self.step_count,
            actions=[_wire_action(action) for action in actions],
            coordinate_space=None if space is None else env_pb2.Size(width_px=space[0], height_px=space[1]),
            settle=_wire_settle(settle or self._defaults["settle"]),
            observation=_wire_view(self._view(view), known=self.observation, of_step=True),
        )
        seen = self.observation
        response = await self._client._call("Step", request, timeout)
        self._note(response.episode)
        self.observation = _observation(response.observation, seen)
        return StepResult(
            observation=self.observation,
            errors=tuple(result.error for result in response.action_results),
            state=self.state,
            end_reason=self.end_reason,
            step_count=self.step_count,
            timings_ms=dict(response.timings_ms),
            screen_change=_screen_change(response),
            replayed=response.replayed,
        )

    async def observe(
        self,
        *,
        refresh: bool = False,
        settle: Settle | None = None,
        view: View | None = None,
        timeout: timedelta = timedelta(minutes=1),
    ) -> Observation:
        """Look without acting; with `settle`, wait for a quiet screen first. Raises: EnvError."""
        request = env_pb2.ObserveRequest(
            episode_id=self.episode_id,
            observation=_wire_view(self._view(view), known=self.observation),
            refresh=refresh,
            settle=_wire_settle(settle),
        )
        seen = self.observation
        response = await self._client._call("Observe", request, timeout)
        self.observation = _observation(response.observation, seen)
        return self.observation

    async def frames(self, *, max_rate_hz: int = 10, view: View | None = None) -> AsyncGenerator[Observation, None]:
        """Yield the screen as it is, and again on change, until the episode is closed. Raises: EnvError.

        Always the newest frame: who reads slowly misses some, and never falls behind. It extends no lease, and where a
        machine stands still between calls there is nothing new between them either. Close it (`contextlib.aclosing`)
        to stop.

        Args:
            max_rate_hz: Most frames a second, 1 to 60.
            view: What they hold; by default what the reset said.
        """
        asked = replace(self._view(view), a11y_tree=False, a11y_elements=False, marks=False, terminal=False)
        request = env_pb2.StreamFramesRequest(
            episode_id=self.episode_id, observation=_wire_view(asked), max_rate_hz=max_rate_hz
        )
        call: Any = self._client._stub.StreamFrames()
        seen: Observation | None = None
        try:
            await call.write(request)
            while (response := await call.read()) is not grpc.aio.EOF:
                seen = _seen(response.frame, seen)
                yield seen
                # The next one is sent only now, and is the newest then.
                await call.write(env_pb2.StreamFramesRequest(acknowledged_sequence=response.sequence))
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        finally:
            call.cancel()

    async def evaluate(self, *, timeout: timedelta = timedelta(minutes=5)) -> Evaluation:
        """Score the episode on the state that its machine is in, and end it. Raises: EnvError."""
        request = env_pb2.EvaluateRequest(request_id=_new_id(), episode_id=self.episode_id)
        response = await self._client._call("Evaluate", request, timeout)
        self._note(response.episode)
        return Evaluation(
            score=response.score,
            checks=tuple(
                Check(name=check.name, score=check.score, evidence=check.evidence) for check in response.checks
            ),
            timings_ms=dict(response.timings_ms),
        )

    async def close(self) -> None:
        """Give up the machine. Idempotent, completed even when the caller is cancelled; never fails.

        If the daemon cannot be reached, the lease ends the episode.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close:{self.episode_id}")
        await asyncio.shield(self._closing)

    async def read_file(self, path: str, *, timeout: timedelta = timedelta(minutes=1)) -> bytes:
        """Return a guest file's bytes, where the pool allows it. Raises: EnvError."""
        request = env_pb2.ReadGuestFileRequest(episode_id=self.episode_id, path=path)
        data: bytes = (await self._client._call("ReadGuestFile", request, timeout)).data
        return data

    async def write_file(self, path: str, data: bytes, *, timeout: timedelta = timedelta(minutes=1)) -> None:
        """Write a whole guest file, where the pool allows it. Raises: EnvError."""
        request = env_pb2.WriteGuestFileRequest(episode_id=self.episode_id, path=path, data=data)
        await self._client._call("WriteGuestFile", request, timeout)

    async def run_command(
        self,
        argv: Sequence[str],
        *,
        as_root: bool = False,
        stdin: bytes = b"",
        timeout: timedelta = timedelta(minutes=1),
    ) -> CommandResult:
        """Run a command in the guest to its end, where the pool allows it. Never made again. Raises: EnvError."""
        request = env_pb2.RunGuestCommandRequest(
            episode_id=self.episode_id, argv=argv, timeout=_wire_duration(timeout), as_root=as_root, stdin=stdin
        )
        # The guest's time counts from when the command starts, so the answer may come a little later.
        response = await self._client._call("RunGuestCommand", request, timeout + timedelta(seconds=10), retry=False)
        return CommandResult(exit_code=response.exit_code, stdout=response.stdout, stderr=response.stderr)

    def _view(self, view: View | None) -> View:
        return view or self._defaults["view"] or View()

    async def _close(self) -> None:
        try:
            await self._client._call("Close", env_pb2.CloseRequest(episode_id=self.episode_id), _CLOSE_TIMEOUT)
        except EnvError as error:
            _logger.warning("episode %s: not closed, its lease will end it: %s", self.episode_id, error)


async def _finish(work: Awaitable[object]) -> None:
    """Wait until the work is done; a cancellation meanwhile is delivered afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _new_id() -> str:
    return str(uuid.uuid4())


# -- for code without an event loop -----------------------------------------------------------------------------


class EnvClient:
    """`AsyncEnvClient` for code without an event loop: it runs one in a thread of its own. Use as a context manager."""

    def __init__(
        self,
        target: str,
        *,
        run: str = "",
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Remember where the daemon is; arguments and errors are those of `AsyncEnvClient`."""
        self._client = AsyncEnvClient(target, run=run, retry=retry, token=token, tls=tls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"EnvClient:{target}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def reset(self, task: str, **options: Unpack[_ResetOptions]) -> Iterator["Episode"]:
        """Open one episode, and close it on the way out. Options are those of `AsyncEnvClient.reset_group`."""
        with self.reset_group(task, size=1, **options) as episodes:
            yield episodes[0]

    @contextmanager
    def reset_group(self, task: str, *, size: int, **options: Unpack[_ResetOptions]) -> Iterator[Sequence["Episode"]]:
        """Open episodes of one task, all or none. Options are those of `AsyncEnvClient.reset_group`."""
        opening = self._client.reset_group(task, size=size, **options)
        episodes = self._wait(opening.__aenter__())
        try:
            yield [Episode(self, episode) for episode in episodes]
        finally:
            self._wait(opening.__aexit__(None, None, None))

    @contextmanager
    def fork(self, parent: "Episode", *, count: int, **options: Unpack[_ForkOptions]) -> Iterator[Sequence["Episode"]]:
        """Branch an active episode, all copies or none. Options are those of `AsyncEnvClient.fork`."""
        forking = self._client.fork(parent._episode, count=count, **options)
        episodes = self._wait(forking.__aenter__())
        try:
            yield [Episode(self, episode) for episode in episodes]
        finally:
            self._wait(forking.__aexit__(None, None, None))

    def list_tasks(self, *, suite: str = "", timeout: timedelta = timedelta(seconds=30)) -> list[Task]:
        """Return the tasks that can be attempted, in id order. Raises: EnvError."""
        return self._wait(self._client.list_tasks(suite=suite, timeout=timeout))

    def list_pools(self, *, timeout: timedelta = timedelta(seconds=30)) -> list[Pool]:
        """Return the daemon's pools as they are now. Raises: EnvError."""
        return self._wait(self._client.list_pools(timeout=timeout))

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupted caller no longer waits, so the work need not go on.
            future.cancel()
            raise


class Episode:
    """`AsyncEpisode` for code without an event loop."""

    def __init__(self, client: EnvClient, episode: AsyncEpisode) -> None:
        self._client = client
        self._episode = episode
        self.episode_id = episode.episode_id
        self.group_id = episode.group_id
        self.parent_episode_id = episode.parent_episode_id
        """The episode that it was forked from; empty if none."""
        self.origin = episode.origin
        """Where its first state came from."""
        self.task_id = episode.task_id
        self.instruction = episode.instruction
        """What the agent is asked to do."""

    def __repr__(self) -> str:
        return repr(self._episode)

    @property
    def observation(self) -> Observation:
        """What the agent saw last."""
        return self._episode.observation

    @property
    def state(self) -> State:
        """Where the episode is in its life, as the last answer said."""
        return self._episode.state

    @property
    def step_count(self) -> int:
        """Steps performed, as the last answer said."""
        return self._episode.step_count

    def step(self, *actions: Action, **options: Unpack[_StepOptions]) -> StepResult:
        """Perform actions, wait for the screen to settle, and look; as `AsyncEpisode.step`. Raises: EnvError."""
        return self._client._wait(self._episode.step(*actions, **options))

    def observe(self, *, refresh: bool = False, settle: Settle | None = None, view: View | None = None) -> Observation:
        """Look without acting. Raises: EnvError."""
        return self._client._wait(self._episode.observe(refresh=refresh, settle=settle, view=view))

    def evaluate(self, *, timeout: timedelta = timedelta(minutes=5)) -> Evaluation:
        """Score the episode, and end it. Raises: EnvError."""
        return self._client._wait(self._episode.evaluate(timeout=timeout))

    def close(self) -> None:
        """Give up the machine. Idempotent; never fails."""
        self._client._wait(self._episode.close())

    def read_file(self, path: str) -> bytes:
        """Return a guest file's bytes, where the pool allows it. Raises: EnvError."""
        return self._client._wait(self._episode.read_file(path))

    def write_file(self, path: str, data: bytes) -> None:
        """Write a whole guest file, where the pool allows it. Raises: EnvError."""
        self._client._wait(self._episode.write_file(path, data))

    def run_command(
        self,
        argv: Sequence[str],
        *,
        as_root: bool = False,
        stdin: bytes = b"",
        timeout: timedelta = timedelta(minutes=1),
    ) -> CommandResult:
        """Run a command in the guest to its end, where the pool allows it. Raises: EnvError."""
        return self._client._wait(self._episode.run_command(argv, as_root=as_root, stdin=stdin, timeout=timeout))
