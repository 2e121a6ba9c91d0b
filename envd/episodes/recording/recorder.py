"""Record episodes while they run. A recording that fails ends; its episode continues.

Nothing is queued without bound: of each episode at most one frame between steps waits to be written, and a disk that
falls behind by more than 256 steps ends the recording.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cuaenv.action_codec import to_json
from envd.base.aio import OwnedTasks
from envd.base.clock import Clock
from envd.base.errors import EnvdError
from envd.desktop.display.encoder import FrameEncoder
from envd.desktop.display.frames import Frame
from envd.desktop.observation import CursorMode, Encoding, Keyframe, ObservationOptions, TileDelta
from envd.episodes.episode import Episode
from envd.episodes.events import EpisodeObserver, PerformedStep
from envd.episodes.recording.records import Kind, packed, packed_json
from envd.episodes.recording.writer import RecordingDirectory, RecordingFile
from envd.episodes.service import EpisodeService

logger = logging.getLogger(__name__)

#: A replay that jumps rebuilds at most so many frames.
_FRAMES_PER_KEYFRAME = 64
_MAX_PENDING = 256


@dataclass(frozen=True, slots=True)
class _Item:
    """What to append: a frame, if there is one and it is new, and then a record."""

    time_s: float
    frame: Frame | None = None
    record: bytes = b""
    end: dict[str, Any] | None = None
    """How the episode ended; the last item has it."""


class Recorder(EpisodeObserver):
    """Records every episode of a service."""

    def __init__(
        self,
        episodes: EpisodeService,
        directory: RecordingDirectory,
        *,
        max_rate_hz: float,
        on_failed: Callable[[bool], None],
        clock: Clock | None = None,
    ) -> None:
        """Record the episodes that are opened or recovered from now on.

        Args:
            on_failed: Called with True when recordings fail, and with False when they work again.
        """
        self._episodes = episodes
        self._directory = directory
        self._max_rate_hz = max_rate_hz
        self._on_failed = on_failed
        self._clock = clock or Clock()
        self._running: dict[str, _Recording] = {}
        self._tasks = OwnedTasks()
        # One thread: writes apply in order, and a slow disk holds up one thread.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._has_failed = False
        on_failed(False)
        episodes.events.add(self)

    def opened(self, episode: Episode) -> None:
        recording = self._running[episode.episode_id] = _Recording(self, episode)
        self._tasks.spawn(recording.run(), name=f"recording:{episode.episode_id}")

    def stepped(self, episode: Episode, step: PerformedStep) -> None:
        value = {
            "index": step.index,
            "source": step.source,
            "actions": step.actions,
            "performed": [to_json(action) for action in step.performed],
            "settled": step.is_settled,
            "ms": round(step.total_ms),
        }
        if any(output is not None for output in step.outputs):
            value["outputs"] = step.outputs
        if step.unrecorded:
            value["unrecorded"] = step.unrecorded
        time_s = step.time.timestamp()
        self._add(episode, _Item(time_s, step.frame, packed_json(Kind.STEP, time_s, value)))

    def rolled_back(self, episode: Episode, *, time: datetime) -> None:
        """Record a rollback; the steps that it took back stay."""
        time_s = self.now_s
        value = {"step_count": episode.progress.step_count, "epoch": episode.epoch, "state_time": time.timestamp()}
        self._add(episode, _Item(time_s, record=packed_json(Kind.ROLLBACK, time_s, value)))

    def scored(self, episode: Episode) -> None:
        time_s = self.now_s
        self._add(episode, _Item(time_s, record=packed_json(Kind.SCORE, time_s, _score(episode))))

    def closed(self, episode: Episode) -> None:
        end = {
            "state": episode.progress.state.value,
            "reason": episode.progress.end_reason,
            "cause": episode.progress.cause,
            "step_count": episode.progress.step_count,
            **_score(episode),
        }
        self._add(episode, _Item(self.now_s, end=end))

    async def aclose(self) -> None:
        """Wait until the recordings of closed episodes are complete. Call after the episodes were closed."""
        await self._tasks.join()
        self._executor.shutdown(wait=True)

    @property
    def now_s(self) -> float:
        return self._clock.now().timestamp()

    def _add(self, episode: Episode, item: _Item) -> None:
        if (recording := self._running.get(episode.episode_id)) is not None:
            recording.add(item)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run blocking work in the writer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def works(self) -> None:
        if self._has_failed:
            self._has_failed = False
            self._on_failed(False)
            logger.info("recording works again")

    def failed(self, episode_id: str, problem: str) -> None:
        logger.error("recording %s: ends here, the episode continues: %s", episode_id, problem)
        self._has_failed = True
        self._on_failed(True)

    async def open(self, episode: Episode) -> RecordingFile:
        meta = packed_json(Kind.META, self.now_s, _meta(episode))
        return await self.in_thread(lambda: self._directory.open(episode.episode_id, meta))  # type: ignore[no-any-return]

    async def watch(self, episode_id: str, recording: "_Recording") -> None:
        """Add an episode's screen at each change, never more than one ahead of the disk."""
        frames = self._episodes.watch_screen(episode_id, max_rate_hz=self._max_rate_hz)
        # A lost machine or display: the steps are still recorded.
        with contextlib.suppress(EnvdError):
            async with aclosing(frames):
                async for frame in frames:
                    recording.add(_Item(self.now_s, frame))
                    await recording.written.wait()

    def forget(self, episode_id: str) -> None:
        del self._running[episode_id]


class _Recording:
    """The recording of one episode."""

    def __init__(self, recorder: Recorder, episode: Episode) -> None:
        self._recorder = recorder
        self._episode = episode
        self._items: list[_Item] = []
        self._changed = asyncio.Event()
        self._encoder = FrameEncoder()
        self._known_image_id = ""
        self._known_pointer: tuple[int, int] | None = None
        self._deltas_left = 0
        self.written = asyncio.Event()
        """Set while nothing waits to be written."""

    def add(self, item: _Item) -> None:
        """Add an item; it is dropped if the disk is too far behind."""
        if len(self._items) < _MAX_PENDING or item.end is not None:
            self._items.append(item)
        self.written.clear()
        self._changed.set()

    async def run(self) -> None:
        """Write items until the episode has ended or the disk fails."""
        episode_id = self._episode.episode_id
        file: RecordingFile | None = None
        watching: asyncio.Task[None] | None = None
        try:
            file = await self._recorder.open(self._episode)
            watching = asyncio.create_task(self._recorder.watch(episode_id, self), name=f"recording:{episode_id}:watch")
            while await self._write_items(file):
                self._recorder.works()
        except (OSError, EnvdError) as error:
            self._recorder.failed(episode_id, getattr(error, "strerror", None) or str(error))
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if file is not None:
                await self._recorder.in_thread(file.close)
            self._recorder.forget(episode_id)

    async def _write_items(self, file: RecordingFile) -> bool:
        """Write everything that waits; returns whether the episode continues. Raises: OSError."""
        await self._changed.wait()
        self._changed.clear()
        items, self._items = self._items, []
        if len(items) >= _MAX_PENDING:
            raise OSError(f"the disk is more than {_MAX_PENDING} steps behind")
        data = b""
        for item in items:
            if item.frame is not None:
                data += await self._frame(item.time_s, item.frame)
            data += item.record
        if data:
            await self._recorder.in_thread(lambda: file.append(data))
        if items and (end := items[-1].end) is not None:
            time_s = items[-1].time_s
            await self._recorder.in_thread(lambda: file.finish(time_s, end))
            return False
        if not self._items:
            self.written.set()
        return True

    async def _frame(self, time_s: float, frame: Frame) -> bytes:
        pointer = None if frame.pointer is None else (frame.pointer.x_px, frame.pointer.y_px)
        if (frame.frame_id, pointer) == (self._known_image_id, self._known_pointer):
            return b""
        is_keyframe = self._deltas_left == 0
        encoded = await self._encoder.encode(
            frame,
            ObservationOptions(
                encoding=Encoding.RAW_ZSTD,
                cursor=CursorMode.HIDDEN,
                known_image_id="" if is_keyframe else self._known_image_id,
            ),
        )
        head: dict[str, Any] = {"image": encoded.image_id, "width": encoded.width_px, "height": encoded.height_px}
        head["pointer"] = pointer
        pixels = b""
        match encoded.content:
            case Keyframe(data=pixels):
                head["key"], self._deltas_left = True, _FRAMES_PER_KEYFRAME
            case TileDelta(tiles=tiles, data=pixels):
                head["tiles"] = [(tile.x_px, tile.y_px, tile.width_px, tile.height_px) for tile in tiles]
        self._deltas_left -= 1
        self._known_image_id, self._known_pointer = encoded.image_id, pointer
        return packed(Kind.FRAME, time_s, json.dumps(head, separators=(",", ":")).encode() + b"\n" + pixels)


def _meta(episode: Episode) -> dict[str, Any]:
    checkpoint_time = episode.spec.origin.checkpoint_time
    return {
        "episode_id": episode.episode_id,
        "group_id": episode.spec.group_id,
        "parent_episode_id": episode.spec.parent_episode_id,
        "task_id": episode.task.task_id,
        "instruction": episode.task.instruction,
        "pool": episode.spec.pool,
        "run": episode.spec.run,
        "owner": episode.spec.owner,
        "max_steps": episode.spec.max_steps,
        "tools": list(episode.tools),
        "first_step": episode.progress.step_count,
        "checkpoint_episode_id": episode.spec.origin.checkpoint_episode_id,
        "checkpoint_time": None if checkpoint_time is None else checkpoint_time.timestamp(),
        "create_time": episode.spec.create_time.timestamp(),
    }


def _score(episode: Episode) -> dict[str, Any]:
    score = episode.progress.score
    if score is None:
        return {"score": None, "evaluator_error": episode.progress.evaluator_error}
    checks = [{"name": check.name, "score": check.score, "evidence": check.evidence} for check in score.checks]
    return {"score": score.score, "checks": checks}
