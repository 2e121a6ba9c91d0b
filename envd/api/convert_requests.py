"""Convert requests to commands of the episode service. Pure.

Every field is validated here, once, against the ranges that the contract documents; the service trusts its commands.
`InvalidRequest` names the field. One that is in the contract but not in this release raises `Unimplemented`.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from cuaenv.action_codec import TOOL_KINDS, BadAction, from_proto
from cuaenv.actions import MAX_ACTION_COUNT, MAX_TOOL_COUNT, Action
from cuaenv.region import Region
from cuaenv.v1 import env_pb2
from envd.api.security.access import TRUSTED, Caller, Scope
from envd.base.config import SettlePolicy
from envd.base.errors import InvalidRequest, Unimplemented
from envd.desktop.observation import A11yFormat, CursorMode, Encoding, ObservationOptions
from envd.episodes.progress import AutomaticCheckpoints, CheckpointTrigger
from envd.episodes.types import CheckpointCommand, ForkCommand, ResetCommand, RollbackCommand, StepCommand
from envd.tasks.fields import MAX_PERTURBATIONS
from envd.tasks.perturbations import PerturbationDraw
from envd.tasks.templates import MAX_SEED

MAX_GROUP_SIZE = 64
MAX_FORK_COUNT = 64
MAX_STEPS = 100_000
MIN_LEASE_TTL_S = 10.0
MAX_LEASE_TTL_S = 3600.0
MIN_CHECKPOINT_TTL_S = 10.0
MAX_CHECKPOINT_TTL_S = 31_536_000.0
MAX_READY_TIMEOUT_S = 86_400.0
DEFAULT_READY_TIMEOUT_S = 600.0
#: A reset or fork times out this much earlier than its caller, so that the caller still receives the reason.
READY_MARGIN_S = 0.5
MAX_QUIET_S = 60.0
MAX_SETTLE_S = 300.0
MAX_SIDE_PX = 32_767
MAX_PIXEL_COUNT = 1 << 30
MAX_SIZE_MULTIPLE_PX = 256
MAX_IGNORED_REGIONS = 64
DEFAULT_QUALITY = 85
MIN_A11Y_CHARS = 64
MAX_A11Y_CHARS = 1_000_000
DEFAULT_A11Y_CHARS = 8192
MAX_FRAME_RATE_HZ = 60
DEFAULT_FRAME_RATE_HZ = 10
MAX_FILE_BYTES = 32 << 20
MAX_PATH_CHARS = 4096
MAX_ARGUMENT_COUNT = 256
MAX_ARGUMENT_CHARS = 65_536
MAX_COMMAND_S = 600.0
DEFAULT_COMMAND_S = 60.0
MAX_PORT_DATA_BYTES = 128 << 10
DEFAULT_PORT_IDLE_S = 600.0
MAX_PORT_IDLE_S = 3600.0
MAX_KEEP_ALIVE_COUNT = 1000
MAX_TASK_ID_COUNT = 1000
#: Most variants among them: each takes up to 2.5 ms to build.
MAX_VARIANT_COUNT = 50

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUN = re.compile(r"[A-Za-z0-9._-]{0,64}")
_ABSOLUTE_PATH = re.compile(r"/|[A-Za-z]:[\\/]")

_ENCODINGS: Mapping["env_pb2.Encoding.ValueType", Encoding] = {
    env_pb2.ENCODING_UNSPECIFIED: Encoding.PNG,
    env_pb2.ENCODING_NONE: Encoding.NONE,
    env_pb2.ENCODING_PNG: Encoding.PNG,
    env_pb2.ENCODING_JPEG: Encoding.JPEG,
    env_pb2.ENCODING_WEBP: Encoding.WEBP,
    env_pb2.ENCODING_RAW_ZSTD: Encoding.RAW_ZSTD,
}
_CURSORS: Mapping["env_pb2.CursorMode.ValueType", CursorMode] = {
    env_pb2.CURSOR_MODE_UNSPECIFIED: CursorMode.DRAWN,
    env_pb2.CURSOR_MODE_DRAWN: CursorMode.DRAWN,
    env_pb2.CURSOR_MODE_HIDDEN: CursorMode.HIDDEN,
    env_pb2.CURSOR_MODE_REPORTED: CursorMode.REPORTED,
}
_TRIGGERS: Mapping["env_pb2.CheckpointTrigger.ValueType", CheckpointTrigger] = {
    env_pb2.CHECKPOINT_TRIGGER_BRANCH_POINT: CheckpointTrigger.BRANCH_POINT,
    env_pb2.CHECKPOINT_TRIGGER_DONE: CheckpointTrigger.DONE,
    env_pb2.CHECKPOINT_TRIGGER_FAILURE: CheckpointTrigger.FAILURE,
}
_A11Y_FORMATS: Mapping["env_pb2.A11yFormat.ValueType", A11yFormat] = {
    env_pb2.A11Y_FORMAT_UNSPECIFIED: A11yFormat.NONE,
    env_pb2.A11Y_FORMAT_OSWORLD_XML: A11yFormat.OSWORLD_XML,
    env_pb2.A11Y_FORMAT_COMPACT: A11yFormat.COMPACT,
}


def fingerprint_of(request: Message) -> bytes:
    """Return a digest of the whole request: equal for a retry, different for any other body."""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()


def reset_command(
    request: env_pb2.ResetRequest, *, time_remaining_s: float | None, caller: Caller = TRUSTED
) -> ResetCommand:
    """Convert a reset request."""
    if not _RUN.fullmatch(request.run):
        raise InvalidRequest("run", "must be at most 64 of A-Z a-z 0-9 . _ -")
    return ResetCommand(
        request_id=request_id_of(request.request_id),
        task_id=(limited if request.checkpoint_id else required)(request.task_id, "task_id"),
        checkpoint_id=limited(request.checkpoint_id, "checkpoint_id", max_chars=64),
        sees_all_owners=caller.scope is Scope.ADMIN,
        pool=limited(request.pool, "pool"),
        group_size=int_in_range(request.group_size, "group_size", default=1, low=1, high=MAX_GROUP_SIZE),
        lease_ttl_s=_lease_ttl_s(request),
        max_steps=int_in_range(request.max_steps, "max_steps", low=1, high=MAX_STEPS) if request.max_steps else None,
        run=request.run,
        owner=caller.name,
        max_machines=caller.max_machines,
        settle=settle_policy(request.settle, "settle") if request.HasField("settle") else None,
        observe=observation_options(request.observation, "observation"),
        perturb=_perturb(request),
        timeout_s=ready_timeout_s(request, time_remaining_s=time_remaining_s),
        automatic=_automatic_checkpoints(request),
        fingerprint=fingerprint_of(request),
    )


def _perturb(request: env_pb2.ResetRequest) -> PerturbationDraw | None:
    if not request.HasField("perturb"):
        return None
    if request.checkpoint_id:
        raise InvalidRequest("perturb", "not supported with a checkpoint; remove it")
    asked = request.perturb
    return PerturbationDraw(
        seed=int_in_range(asked.seed, "perturb.seed", low=0, high=MAX_SEED),
        kinds=tuple(asked.kinds),
        count=int_in_range(asked.count, "perturb.count", default=1, low=1, high=MAX_PERTURBATIONS),
    )


def ready_timeout_s(request: env_pb2.ResetRequest, *, time_remaining_s: float | None) -> float:
    """Return the limit for admission and setup of a reset. Raises: InvalidRequest: it is out of range."""
    if request.HasField("ready_timeout"):
        return seconds(request.ready_timeout, "ready_timeout", above=0.0, high=MAX_READY_TIMEOUT_S)
    return _ready_timeout_s(time_remaining_s)


def fork_command(
    request: env_pb2.ForkRequest, *, time_remaining_s: float | None, caller: Caller = TRUSTED
) -> ForkCommand:
    """Convert a fork request; `time_remaining_s` is the time until the call's deadline, if it has one."""
    return ForkCommand(
        request_id=request_id_of(request.request_id),
        episode_id=episode_id_of(request.episode_id),
        step_index=int_in_range(request.step_index, "step_index", low=0, high=MAX_STEPS),
        fork_count=int_in_range(request.fork_count, "fork_count", low=1, high=MAX_FORK_COUNT),
        lease_ttl_s=_lease_ttl_s(request),
        max_machines=caller.max_machines,
        observe=observation_options(request.observation, "observation"),
        timeout_s=_ready_timeout_s(time_remaining_s),
        epoch=epoch_of(request),
        fingerprint=fingerprint_of(request),
    )


def checkpoint_command(request: env_pb2.CreateCheckpointRequest) -> CheckpointCommand:
    """Convert a request for a checkpoint. Raises: InvalidRequest: a field is missing or out of range."""
    ttl = request.ttl if request.HasField("ttl") else None
    return CheckpointCommand(
        request_id=request_id_of(request.request_id),
        episode_id=episode_id_of(request.episode_id),
        step_index=int_in_range(request.step_index, "step_index", low=0, high=MAX_STEPS),
        label=limited(request.label, "label"),
        ttl_s=None if ttl is None else seconds(ttl, "ttl", low=MIN_CHECKPOINT_TTL_S, high=MAX_CHECKPOINT_TTL_S),
        pinned=request.pinned,
        epoch=epoch_of(request),
        fingerprint=fingerprint_of(request),
    )


def rollback_command(request: env_pb2.RollbackRequest) -> RollbackCommand:
    """Convert a request for a rollback. Raises: InvalidRequest: a field is missing or out of range."""
    return RollbackCommand(
        request_id=request_id_of(request.request_id),
        episode_id=episode_id_of(request.episode_id),
        checkpoint_id=checkpoint_id_of(request.checkpoint_id),
        epoch=epoch_of(request),
        observe=observation_options(request.observation, "observation"),
        fingerprint=fingerprint_of(request),
    )


def score_command(
    request: env_pb2.EvaluateRequest, *, time_remaining_s: float | None, caller: Caller = TRUSTED
) -> ResetCommand:
    """Convert a request to score a checkpoint. Raises: InvalidRequest: a field is missing, malformed or set as well."""
    for field in ("episode_id", "epoch"):
        if getattr(request, field):
            raise InvalidRequest(field, "cannot be set with checkpoint_id; remove one of them")
    return ResetCommand(
        request_id=request_id_of(request.request_id),
        task_id="",
        checkpoint_id=checkpoint_id_of(request.checkpoint_id),
        owner=caller.name,
        sees_all_owners=caller.scope is Scope.ADMIN,
        max_machines=caller.max_machines,
        observe=ObservationOptions(encoding=Encoding.NONE),
        timeout_s=_ready_timeout_s(time_remaining_s),
        fingerprint=fingerprint_of(request),
    )


def step_command(request: env_pb2.StepRequest, *, screen_px: tuple[int, int] | None, prefix: str = "") -> StepCommand:
    """Convert a step request; the screen's (width, height) is required if the request has a `coordinate_space`."""
    place = None
    if request.HasField("coordinate_space"):
        reference_px = _size_px(request.coordinate_space, f"{prefix}coordinate_space")
        if screen_px is None:
            raise InvalidRequest(f"{prefix}coordinate_space", "cannot be used: the screen's size is unknown")
        place = partial(to_screen, reference_px=reference_px, screen_px=screen_px)
    return StepCommand(
        request_id=request_id_of(request.request_id, f"{prefix}request_id"),
        episode_id=episode_id_of(request.episode_id, f"{prefix}episode_id"),
        step_index=int_in_range(request.step_index, f"{prefix}step_index", low=0, high=MAX_STEPS),
        actions=actions_from_proto(request.actions, place=place, field=f"{prefix}actions"),
        settle=settle_policy(request.settle, f"{prefix}settle") if request.HasField("settle") else None,
        observe=observation_options(request.observation, f"{prefix}observation", of_step=True),
        epoch=epoch_of(request, prefix),
        expects_idle=request.expects_idle,
        fingerprint=fingerprint_of(request),
    )


def to_screen(x: int, y: int, *, reference_px: tuple[int, int], screen_px: tuple[int, int]) -> tuple[int, int]:
    """Return the guest pixel under the centre of a pixel of a reference image. Sizes are (width, height).

    A position inside the reference maps to one inside the screen, one outside to one outside.
    """
    # floor((position + 0.5) * screen / reference), in integers so that rounding cannot leave the screen.
    return ((2 * x + 1) * screen_px[0] // (2 * reference_px[0]), (2 * y + 1) * screen_px[1] // (2 * reference_px[1]))


def actions_from_proto(
    messages: Sequence[env_pb2.Action], *, place: Callable[[int, int], tuple[int, int]] | None, field: str = "actions"
) -> tuple[Action, ...]:
    """Return the actions of a request; without `place`, which scales them, positions are guest pixels already.

    What only the guest can judge (a position outside of the screen, an unknown key name) passes through; the guest
    reports it as the agent's mistake.

    Raises:
        InvalidRequest: A field is missing or out of range. The error names it, as in `actions[2].click.count`.
    """
    if not 1 <= len(messages) <= MAX_ACTION_COUNT:
        raise InvalidRequest(field, f"has {len(messages)} items; give 1 to {MAX_ACTION_COUNT}")
    tool_count = sum(message.WhichOneof("kind") in TOOL_KINDS for message in messages)
    if tool_count > MAX_TOOL_COUNT:
        raise InvalidRequest(field, f"has {tool_count} actions of tools; give at most {MAX_TOOL_COUNT}")
    actions: list[Action] = []
    for index, message in enumerate(messages):
        try:
            actions.append(from_proto(message, place=place))
        except BadAction as error:
            raise InvalidRequest(".".join(filter(None, (f"{field}[{index}]", error.field))), error.problem) from error
    return tuple(actions)


def episode_id_of(value: str, field: str = "episode_id") -> str:
    """Return an episode id. Raises: InvalidRequest."""
    return required(value, field, max_chars=64)


def checkpoint_id_of(value: str) -> str:
    """Return a checkpoint's id. Raises: InvalidRequest."""
    return required(value, "checkpoint_id", max_chars=64)


def keep_alive_of(request: env_pb2.KeepAliveRequest) -> tuple[list[str], float | None]:
    """Return the episode ids without duplicates, and the lease length, None to keep each one's length."""
    count = len(request.episode_ids)
    if not 1 <= count <= MAX_KEEP_ALIVE_COUNT:
        raise InvalidRequest("episode_ids", f"has {count} items; give 1 to {MAX_KEEP_ALIVE_COUNT}")
    ids = (episode_id_of(value, f"episode_ids[{index}]") for index, value in enumerate(request.episode_ids))
    return list(dict.fromkeys(ids)), _lease_ttl_s(request)


def task_ids_of(values: Sequence[str]) -> tuple[str, ...]:
    """Return task ids without duplicates. Raises: InvalidRequest."""
    if len(values) > MAX_TASK_ID_COUNT:
        raise InvalidRequest("task_ids", f"has {len(values)} items; give at most {MAX_TASK_ID_COUNT}")
    variant_count = sum("?" in value for value in values)
    if variant_count > MAX_VARIANT_COUNT:
        raise InvalidRequest("task_ids", f"has {variant_count} variants; give at most {MAX_VARIANT_COUNT}")
    ids = (required(value, f"task_ids[{index}]", max_chars=256) for index, value in enumerate(values))
    return tuple(dict.fromkeys(ids))


def guest_path_of(path: str) -> str:
    """Return an absolute path in a Linux or Windows guest. Raises: InvalidRequest."""
    required(path, "path", max_chars=MAX_PATH_CHARS)
    if not _ABSOLUTE_PATH.match(path) or "\0" in path:
        raise InvalidRequest("path", "must be absolute, such as /home/user/notes.txt")
    return path


def file_data_of(data: bytes, field: str = "data") -> bytes:
    """Return the content of a file. Raises: InvalidRequest."""
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(field, f"has {len(data)} bytes; at most {MAX_FILE_BYTES}")
    return data


def argv_of(request: env_pb2.RunGuestCommandRequest) -> tuple[str, ...]:
    """Return a command's program and arguments. Raises: InvalidRequest."""
    if not 1 <= len(request.argv) <= MAX_ARGUMENT_COUNT:
        raise InvalidRequest("argv", f"has {len(request.argv)} items; give 1 to {MAX_ARGUMENT_COUNT}")
    for index, argument in enumerate(request.argv):
        limited(argument, f"argv[{index}]", max_chars=MAX_ARGUMENT_CHARS)
        if "\0" in argument:
            raise InvalidRequest(f"argv[{index}]", "has a NUL character")
    required(request.argv[0], "argv[0]", max_chars=MAX_PATH_CHARS)
    return tuple(request.argv)


def command_timeout_s(request: env_pb2.RunGuestCommandRequest) -> float:
    """Return the timeout of a command in seconds. Raises: InvalidRequest."""
    timeout = request.timeout if request.HasField("timeout") else None
    return seconds(timeout, "timeout", above=0.0, high=MAX_COMMAND_S, default=DEFAULT_COMMAND_S)


def forward_request(request: env_pb2.ForwardGuestPortRequest) -> tuple[str, int, float]:
    """Return the episode id, the port and the idle timeout in seconds of a connection. Raises: InvalidRequest."""
    idle_timeout = request.idle_timeout if request.HasField("idle_timeout") else None
    return (
        episode_id_of(request.episode_id),
        int_in_range(request.port, "port", low=1, high=65_535),
        seconds(idle_timeout, "idle_timeout", low=1.0, high=MAX_PORT_IDLE_S, default=DEFAULT_PORT_IDLE_S),
    )


def port_data_of(request: env_pb2.ForwardGuestPortRequest) -> bytes:
    """Return the bytes for a guest's port. Raises: InvalidRequest."""
    if len(request.data) > MAX_PORT_DATA_BYTES:
        raise InvalidRequest("data", f"has {len(request.data)} bytes; at most {MAX_PORT_DATA_BYTES}")
    return request.data


def settle_policy(message: env_pb2.SettlePolicy, field: str) -> SettlePolicy:
    """Return when a screen counts as settled. Raises: InvalidRequest."""
    count = len(message.ignored_regions)
    if count > MAX_IGNORED_REGIONS:
        raise InvalidRequest(f"{field}.ignored_regions", f"has {count} items; at most {MAX_IGNORED_REGIONS}")
    ignored = [_region(rect, f"{field}.ignored_regions[{index}]") for index, rect in enumerate(message.ignored_regions)]
    quiet = message.quiet if message.HasField("quiet") else None
    least = message.min if message.HasField("min") else None
    most = message.max if message.HasField("max") else None
    default = SettlePolicy()
    quiet_s = seconds(quiet, f"{field}.quiet", low=0.0, high=MAX_QUIET_S, default=default.quiet_ms / 1000)
    min_s = seconds(least, f"{field}.min", low=0.0, high=MAX_QUIET_S, default=default.min_ms / 1000)
    max_s = seconds(most, f"{field}.max", low=0.0, high=MAX_SETTLE_S, default=max(default.max_ms / 1000, min_s))
    if max_s < min_s:
        raise InvalidRequest(f"{field}.max", f"{max_s:g} s is less than {field}.min, {min_s:g} s")
    return SettlePolicy(
        quiet_ms=round(quiet_s * 1000),
        # The client's quiet time is the rule: its policy has no idle time.
        idle_ms=0,
        min_ms=round(min_s * 1000),
        max_ms=round(max_s * 1000),
        ignored_regions=tuple(ignored),
    )


def observation_options(
    message: env_pb2.ObservationOptions, field: str, *, of_step: bool = False
) -> ObservationOptions:
    """Return the options of an observation; `of_step` is whether a step precedes it."""
    if message.encoding not in _ENCODINGS:
        raise Unimplemented(f"{field}.encoding {message.encoding} is unknown to this release")
    if message.cursor not in _CURSORS:
        raise Unimplemented(f"{field}.cursor {message.cursor} is unknown to this release")
    if message.a11y_format not in _A11Y_FORMATS:
        raise Unimplemented(f"{field}.a11y_format {message.a11y_format} is unknown to this release")
    wants_change = message.include_screen_change or message.include_grey_difference
    if wants_change and not of_step:
        raise InvalidRequest(f"{field}.include_screen_change", "is only supported in Step; remove it")
    return ObservationOptions(
        encoding=_ENCODINGS[message.encoding],
        quality=int_in_range(message.quality, f"{field}.quality", default=DEFAULT_QUALITY, low=1, high=100),
        region=_region(message.region, f"{field}.region") if message.HasField("region") else None,
        max_width_px=int_in_range(message.max_width_px, f"{field}.max_width_px", low=0, high=MAX_SIDE_PX),
        max_height_px=int_in_range(message.max_height_px, f"{field}.max_height_px", low=0, high=MAX_SIDE_PX),
        max_pixel_count=int_in_range(message.max_pixel_count, f"{field}.max_pixel_count", low=0, high=MAX_PIXEL_COUNT),
        size_multiple_px=int_in_range(
            message.size_multiple_px, f"{field}.size_multiple_px", low=0, high=MAX_SIZE_MULTIPLE_PX
        ),
        a11y_format=_A11Y_FORMATS[message.a11y_format],
        a11y_max_chars=int_in_range(
            message.a11y_max_chars,
            f"{field}.a11y_max_chars",
            default=DEFAULT_A11Y_CHARS,
            low=MIN_A11Y_CHARS,
            high=MAX_A11Y_CHARS,
        ),
        include_a11y_elements=message.include_a11y_elements,
        draw_marks=message.draw_marks,
        include_terminal=message.include_terminal,
        cursor=_CURSORS[message.cursor],
        known_image_id=limited(message.known_image_id, f"{field}.known_image_id"),
        include_screen_change=wants_change,
        include_grey_difference=message.include_grey_difference,
    )


def frames_request(request: env_pb2.StreamFramesRequest) -> tuple[str, ObservationOptions, int]:
    """Return the episode id, the observation options and the maximum rate in Hz. Raises: InvalidRequest."""
    options = observation_options(request.observation, "observation")
    if options.asks_guest:
        raise InvalidRequest("observation", "a stream of frames has only pixels; call Observe for the rest")
    rate_hz = int_in_range(
        request.max_rate_hz, "max_rate_hz", default=DEFAULT_FRAME_RATE_HZ, low=1, high=MAX_FRAME_RATE_HZ
    )
    return episode_id_of(request.episode_id), options, rate_hz


def _automatic_checkpoints(request: env_pb2.ResetRequest) -> AutomaticCheckpoints:
    on = set()
    for index, value in enumerate(request.checkpoint_on):
        if value not in _TRIGGERS:
            raise InvalidRequest(f"checkpoint_on[{index}]", f"{value} is not BRANCH_POINT, DONE or FAILURE")
        on.add(_TRIGGERS[value])
    every_steps = int_in_range(
        request.checkpoint_every_steps, "checkpoint_every_steps", default=0, low=1, high=MAX_STEPS
    )
    return AutomaticCheckpoints(every_steps=every_steps, on=frozenset(on))


def epoch_of(
    request: env_pb2.StepRequest
    | env_pb2.EvaluateRequest
    | env_pb2.ForkRequest
    | env_pb2.CreateCheckpointRequest
    | env_pb2.RollbackRequest,
    prefix: str = "",
) -> int:
    """Return the epoch of a request; 0 if it has none. Raises: InvalidRequest."""
    return int_in_range(request.epoch, f"{prefix}epoch", low=0, high=(1 << 31) - 1)


def _region(message: env_pb2.Rect, field: str) -> Region:
    return Region(
        x_px=int_in_range(message.x_px, f"{field}.x_px", low=0, high=MAX_SIDE_PX),
        y_px=int_in_range(message.y_px, f"{field}.y_px", low=0, high=MAX_SIDE_PX),
        width_px=int_in_range(message.width_px, f"{field}.width_px", low=1, high=MAX_SIDE_PX),
        height_px=int_in_range(message.height_px, f"{field}.height_px", low=1, high=MAX_SIDE_PX),
    )


def _size_px(message: env_pb2.Size, field: str) -> tuple[int, int]:
    width_px = int_in_range(message.width_px, f"{field}.width_px", low=1, high=MAX_SIDE_PX)
    return width_px, int_in_range(message.height_px, f"{field}.height_px", low=1, high=MAX_SIDE_PX)


def _ready_timeout_s(time_remaining_s: float | None) -> float:
    if time_remaining_s is None:
        return DEFAULT_READY_TIMEOUT_S
    return max(time_remaining_s - READY_MARGIN_S, time_remaining_s / 2)


def _lease_ttl_s(request: env_pb2.ResetRequest | env_pb2.ForkRequest | env_pb2.KeepAliveRequest) -> float | None:
    if not request.HasField("lease_ttl"):
        return None
    return seconds(request.lease_ttl, "lease_ttl", low=MIN_LEASE_TTL_S, high=MAX_LEASE_TTL_S)


def required(value: str, field: str, *, max_chars: int = 256) -> str:
    """Return a required text. Raises: InvalidRequest."""
    if not value:
        raise InvalidRequest(field, "is required")
    return limited(value, field, max_chars=max_chars)


def limited(value: str, field: str, *, max_chars: int = 256) -> str:
    """Return a text of limited length. Raises: InvalidRequest."""
    if len(value) > max_chars:
        raise InvalidRequest(field, f"has {len(value)} characters; at most {max_chars}")
    return value


def request_id_of(value: str, field: str = "request_id") -> str:
    """Return a request id. Raises: InvalidRequest."""
    if not value:
        raise InvalidRequest(field, "is required; make one per request, such as a UUID4, and keep it on retries")
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidRequest(field, "must be 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def int_in_range(value: int, field: str, *, low: int, high: int, default: int | None = None) -> int:
    """Return an integer within [low, high]; 0 means `default` if there is one. Raises: InvalidRequest."""
    if value == 0 and default is not None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(field, f"{value} is outside [{low}, {high}]")
    return value


def seconds(
    value: Duration | None,
    field: str,
    *,
    high: float,
    low: float | None = None,
    above: float | None = None,
    default: float | None = None,
) -> float:
    """Return a duration in seconds within [low, high] or (above, high].

    Raises:
        InvalidRequest: Out of range, or absent without a default.
    """
    if value is None:
        if default is None:
            raise InvalidRequest(field, "is required")
        return default
    length_s: float = value.seconds + value.nanos / 1e9
    too_short = (low is not None and length_s < low) or (above is not None and length_s <= above)
    if too_short or length_s > high:
        lower = f"({above:g}" if above is not None else f"[{low:g}"
        raise InvalidRequest(field, f"{length_s:g} s is outside {lower} s, {high:g} s]")
    return length_s
