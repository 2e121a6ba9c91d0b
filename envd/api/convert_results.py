"""Convert results of the episode service to messages. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import overload

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cuaenv.capabilities import CAPABILITIES
from cuaenv.region import Region
from cuaenv.v1 import env_pb2
from envd.base.config import LimitsConfig
from envd.base.version import envd_version
from envd.desktop.observation import (
    A11yElements,
    EncodedFrame,
    Encoding,
    Keyframe,
    Observation,
    ScreenComparison,
    TileDelta,
    UnchangedImage,
)
from envd.episodes.checkpoints.manifest import Manifest
from envd.episodes.progress import CheckpointTrigger, EpisodeOrigin, EpisodeState, EpisodeStatus
from envd.episodes.types import EvaluateResult, OpenedGroup, RollbackResult, StepOutcome
from envd.pool.queue import QueueEntry
from envd.pool.status import PoolStatus
from envd.tasks.model import Task
from envd.tasks.templates import split_of
from envd.tasks.text import ScoreResult

_STATES = {
    EpisodeState.ACTIVE: env_pb2.Episode.STATE_ACTIVE,
    EpisodeState.TERMINATED: env_pb2.Episode.STATE_TERMINATED,
    EpisodeState.TRUNCATED: env_pb2.Episode.STATE_TRUNCATED,
    EpisodeState.FAILED: env_pb2.Episode.STATE_FAILED,
}
_TRIGGERS: Mapping[str, "env_pb2.CheckpointTrigger.ValueType"] = {
    CheckpointTrigger.STEPS.value: env_pb2.CHECKPOINT_TRIGGER_STEPS,
    CheckpointTrigger.BRANCH_POINT.value: env_pb2.CHECKPOINT_TRIGGER_BRANCH_POINT,
    CheckpointTrigger.DONE.value: env_pb2.CHECKPOINT_TRIGGER_DONE,
    CheckpointTrigger.FAILURE.value: env_pb2.CHECKPOINT_TRIGGER_FAILURE,
}
_ENCODINGS: Mapping[Encoding, "env_pb2.Encoding.ValueType"] = {
    Encoding.PNG: env_pb2.ENCODING_PNG,
    Encoding.JPEG: env_pb2.ENCODING_JPEG,
    Encoding.WEBP: env_pb2.ENCODING_WEBP,
    Encoding.RAW_ZSTD: env_pb2.ENCODING_RAW_ZSTD,
}
_UNRECORDED: Mapping[str, "env_pb2.UnrecordedRequest.Kind.ValueType"] = {
    "not_recorded": env_pb2.UnrecordedRequest.KIND_NOT_RECORDED,
    "websocket": env_pb2.UnrecordedRequest.KIND_WEBSOCKET,
}


def reset_response(result: OpenedGroup, *, share_images: bool = False) -> env_pb2.ResetResponse:
    return env_pb2.ResetResponse(
        episodes=[episode_message(info, with_origin=True) for info in result.episodes],
        observations=map(observation_message, _group_observations(result, share_images=share_images)),
        instruction=result.instruction,
        timings_ms=result.timings_ms,
    )


def fork_response(result: OpenedGroup, *, share_images: bool = False) -> env_pb2.ForkResponse:
    return env_pb2.ForkResponse(
        episodes=[episode_message(info, with_origin=True) for info in result.episodes],
        observations=map(observation_message, _group_observations(result, share_images=share_images)),
        timings_ms=result.timings_ms,
    )


def _group_observations(result: OpenedGroup, *, share_images: bool) -> Iterator[Observation]:
    """Yield the observations of a group; a shared image that was yielded before is `UnchangedImage`."""
    sent: set[str] = set()
    for observation in result.observations:
        frame = observation.frame
        if share_images and frame.content is not None and frame.image_id in sent:
            yield replace(observation, frame=replace(frame, content=UnchangedImage(base_image_id=frame.image_id)))
        else:
            if frame.content is not None:
                sent.add(frame.image_id)
            yield observation


def step_response(result: StepOutcome) -> env_pb2.StepResponse:
    return env_pb2.StepResponse(
        episode=episode_message(result.episode),
        observation=observation_message(result.observation),
        action_results=[
            env_pb2.ActionResult(
                error=_text(outcome.error),
                input_ms=outcome.input_ms,
                output=_text(outcome.output),
                exit_code=outcome.exit_code,
                timed_out=outcome.timed_out,
                left_out_bytes=outcome.left_out_bytes,
            )
            for outcome in result.outcomes
        ],
        timings_ms=result.timings_ms,
        screen_change=_screen_change(result.observation.screen_change),
        replayed=result.replayed,
        unrecorded_requests=[
            env_pb2.UnrecordedRequest(kind=_UNRECORDED[each.kind], method=_text(each.method), url=_text(each.url))
            for each in result.unrecorded
        ],
    )


def rollback_response(result: RollbackResult) -> env_pb2.RollbackResponse:
    return env_pb2.RollbackResponse(
        episode=episode_message(result.episode),
        observation=observation_message(result.observation),
        timings_ms=result.timings_ms,
    )


def evaluate_response(result: ScoreResult) -> env_pb2.EvaluateResponse:
    return env_pb2.EvaluateResponse(
        episode=episode_message(result.episode) if isinstance(result, EvaluateResult) else None,
        score=result.score,
        checks=[
            env_pb2.Check(name=check.name, score=check.score, evidence=_text(check.evidence)) for check in result.checks
        ],
        timings_ms=result.timings_ms,
        cached=result.cached,
        basis_digest=result.basis_digest,
    )


def server_message(limits: LimitsConfig, *, max_machines: int | None) -> env_pb2.Server:
    """Return the message for this daemon; `max_machines` is the quota of the caller's token."""
    return env_pb2.Server(
        release=envd_version(),
        capabilities=sorted(CAPABILITIES),
        default_lease_ttl=_duration(limits.lease_ttl_s),
        max_lease_ttl=_duration(limits.lease_ttl_max_s),
        max_steps=limits.max_steps,
        max_machine_count=max_machines,
    )


def episode_message(info: EpisodeStatus, *, with_origin: bool = False) -> env_pb2.Episode:
    spec, progress = info.spec, info.progress
    return env_pb2.Episode(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        parent_episode_id=spec.parent_episode_id,
        task_id=spec.task_id,
        pool=spec.pool,
        state=_STATES[progress.state],
        end_reason=progress.end_reason,
        step_count=progress.step_count,
        max_steps=spec.max_steps,
        create_time=_timestamp(spec.create_time),
        expire_time=_timestamp(info.expire_time),
        run=spec.run,
        origin=_origin(spec.origin) if with_origin else None,
        guest_end_cause=_text(progress.guest_end_cause),
        checkpoint_id=spec.origin.checkpoint_id,
        perturbations=progress.perturbations,
        tools=info.tools,
        epoch=info.epoch,
        parked=info.is_parked,
    )


def _origin(origin: EpisodeOrigin) -> env_pb2.Origin:
    return env_pb2.Origin(
        template_digest=origin.template_digest,
        overlay_parent=origin.overlay_parent,
        first_frame_id=origin.first_frame_id,
        is_new_session=origin.is_new_session,
    )


def checkpoint_message(checkpoint: Manifest) -> env_pb2.Checkpoint:
    spec, progress = checkpoint.spec, checkpoint.progress
    return env_pb2.Checkpoint(
        checkpoint_id=checkpoint.checkpoint_id,
        label=checkpoint.label,
        episode_id=spec.episode_id,
        task_id=spec.task_id,
        pool=spec.pool,
        run=spec.run,
        step_count=progress.step_count,
        max_steps=spec.max_steps,
        frame_id=checkpoint.frame_id,
        parent_checkpoint_id=progress.last_checkpoint_id,
        size_bytes=checkpoint.size_bytes,
        pinned=checkpoint.pinned,
        epoch=checkpoint.epoch,
        create_time=_timestamp(checkpoint.create_time),
        expire_time=_timestamp(checkpoint.expire_time),
        trigger=_TRIGGERS.get(checkpoint.trigger, env_pb2.CHECKPOINT_TRIGGER_UNSPECIFIED),
    )


def observation_message(observation: Observation) -> env_pb2.Observation:
    """Return the message for an observation; parts that were not requested are absent."""
    settle = observation.settle
    return env_pb2.Observation(
        frame=frame_message(observation.frame),
        a11y_tree=_text(observation.a11y_tree),
        a11y_elements=_elements(observation.a11y_elements),
        terminal=_text(observation.terminal),
        settle=None
        if settle is None
        else env_pb2.SettleResult(
            settled=settle.settled,
            settle_ms=settle.settle_ms,
            change_count=settle.change_count,
            moving_regions=[_rect(region) for region in settle.moving],
        ),
        timings_ms=observation.timings_ms,
    )


def pool_messages(
    pools: Iterable[PoolStatus], queues: Mapping[str, Sequence[QueueEntry]] | None = None
) -> list[env_pb2.Pool]:
    """Return the messages for pools, in name order, with their queues if given."""
    messages = [_pool(pool) for pool in sorted(pools, key=lambda pool: pool.name)]
    for message in messages:
        message.queue.extend(map(_queued_group, (queues or {}).get(message.name, ())))
    return messages


def _queued_group(group: QueueEntry) -> env_pb2.QueuedGroup:
    return env_pb2.QueuedGroup(
        run=group.run,
        machine_count=group.machine_count,
        position=group.position,
        waited=_duration(group.waited_s),
        left=_duration(group.left_s),
        reason=group.reason,
    )


def task_message(task: Task, *, variant_count: int, obstacles: Sequence[str] | None) -> env_pb2.Task:
    """Return the message for a task, without its setup, checker and oracle; `obstacles` is None if unknown."""
    return env_pb2.Task(
        task_id=task.task_id,
        instruction=task.instruction,
        level=task.level,
        suite=suite_of(task),
        version=task.version,
        tags=task.tags,
        max_steps=task.max_steps,
        os=task.os.value,
        domain=task.domain,
        tools=task.tools,
        split=split_of(task),
        variant_count=variant_count,
        runnable=None if obstacles is None else not obstacles,
        obstacles=obstacles or (),
    )


def suite_of(task: Task) -> str:
    """Return the suite: the first part of the task id."""
    return task.task_id.partition("/")[0]


def _pool(pool: PoolStatus) -> env_pb2.Pool:
    if pool.healthy:
        health = env_pb2.Pool.HEALTH_DEGRADED if pool.problem else env_pb2.Pool.HEALTH_HEALTHY
    else:
        health = env_pb2.Pool.HEALTH_FAILING
    return env_pb2.Pool(
        name=pool.name,
        image=pool.image,
        os=pool.os,
        accelerator=pool.accelerator,
        capacity_count=pool.capacity,
        idle_count=pool.idle_count,
        leased_count=pool.leased_count,
        starting_count=pool.starting_count,
        dying_count=pool.dying_count,
        waiting_count=pool.waiting_count,
        memory_bytes=pool.memory_bytes,
        health=health,
        problem=pool.problem,
        pss_bytes=pool.pss_bytes,
        template_digest=pool.template_digest,
        always_running=pool.always_running,
        tools=pool.tools,
        not_forkable=pool.not_forkable,
        parked_count=pool.parked_count,
        resident_count=pool.resident,
    )


def frame_message(frame: EncodedFrame) -> env_pb2.Frame:
    message = env_pb2.Frame(
        frame_id=frame.frame_id,
        image_id=frame.image_id,
        width_px=frame.width_px,
        height_px=frame.height_px,
        screen=env_pb2.Size(width_px=frame.screen_width_px, height_px=frame.screen_height_px),
        capture_time=_timestamp(frame.capture_time),
        cursor=None if frame.cursor is None else env_pb2.Point(x=frame.cursor.x_px, y=frame.cursor.y_px),
    )
    match frame.content:
        case Keyframe(encoding=encoding, data=data):
            message.keyframe.CopyFrom(env_pb2.Keyframe(encoding=_ENCODINGS[encoding], data=data))
        case TileDelta(base_image_id=base, tiles=tiles, data=data):
            delta = env_pb2.TileDelta(base_image_id=base, tiles=[_rect(tile) for tile in tiles], data=data)
            message.tiles.CopyFrom(delta)
        case UnchangedImage(base_image_id=base):
            message.unchanged.base_image_id = base
        case None:
            pass
    return message


def _elements(elements: A11yElements | None) -> env_pb2.A11yElements | None:
    if elements is None:
        return None
    return env_pb2.A11yElements(
        elements=[
            env_pb2.A11yElement(
                role=_text(element.role),
                name=_text(element.name),
                value=_text(element.value),
                states=element.states,
                box=_rect(element.box),
                depth=element.depth,
                mark=element.mark,
                actionable=element.is_actionable,
            )
            for element in elements.items
        ],
        left_out_count=elements.left_out_count,
        cut_by_guest=elements.is_cut,
    )


def _screen_change(change: ScreenComparison | None) -> env_pb2.ScreenChange | None:
    if change is None:
        return None
    return env_pb2.ScreenChange(
        base_frame_id=change.base_frame_id,
        changed_fraction=change.changed_fraction,
        changed_regions=[_rect(region) for region in change.changed_regions],
        grey_difference=change.grey_difference,
    )


def _rect(region: Region) -> env_pb2.Rect:
    return env_pb2.Rect(x_px=region.x_px, y_px=region.y_px, width_px=region.width_px, height_px=region.height_px)


@overload
def _text(text: str) -> str: ...
@overload
def _text(text: None) -> None: ...
def _text(text: str | None) -> str | None:
    # Guest text may contain lone surrogates (JSON escapes allow them); protobuf would refuse the whole message.
    return None if text is None else text.encode(errors="replace").decode()


def _timestamp(moment: datetime) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp


def _duration(length_s: float) -> Duration:
    """Return a duration message, to the microsecond."""
    duration = Duration()
    duration.FromMicroseconds(round(length_s * 1e6))
    return duration
