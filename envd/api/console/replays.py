"""Read recordings for the console, in one thread of its own."""

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from PIL import Image

from envd.episodes.recording.library import Library, Recording

T = TypeVar("T")

_QUALITY = 85


class Replays:
    """The recordings of a library, as the page needs them."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="replays")

    async def summaries(self) -> list[dict[str, Any]]:
        """Return all recordings, the newest first."""
        return [
            {
                "id": each.meta["episode_id"],
                "task": each.meta["task_id"],
                "pool": each.meta["pool"],
                "run": each.meta["run"],
                "owner": each.meta["owner"],
                "created": each.meta["create_time"],
                "time": each.time_s,
                "bytes": each.size_bytes,
                "state": (each.end or {}).get("state", ""),
                "reason": (each.end or {}).get("reason", ""),
                "steps": (each.end or {}).get("step_count"),
                "score": (each.end or {}).get("score"),
            }
            for each in await self._in_thread(self._library.summaries)
        ]

    async def owner(self, episode_id: str) -> str:
        """Return an episode's owner. Raises: RecordingUnreadable."""
        recording = await self._read(episode_id)
        return str(recording.meta["owner"])

    async def detail(self, episode_id: str) -> dict[str, Any]:
        """Return a recording without its pixels. Raises: RecordingUnreadable."""
        recording = await self._read(episode_id)
        verdict = recording.end or recording.score or {}
        return {
            **recording.meta,
            "state": (recording.end or {}).get("state", ""),
            "reason": (recording.end or {}).get("reason", ""),
            "score": verdict.get("score"),
            "checks": verdict.get("checks", []),
            "evaluator_error": verdict.get("evaluator_error", ""),
            "steps": recording.steps,
            "frames": [[frame.time_s, frame.pointer_px] for frame in recording.frames],
            "screen": [recording.frames[0].head["width"], recording.frames[0].head["height"]]
            if recording.frames
            else None,
        }

    async def jpeg(self, episode_id: str, index: int) -> bytes:
        """Return a frame as JPEG. Raises: RecordingUnreadable."""
        return await self._in_thread(lambda: _jpeg(self._library.read(episode_id), index))

    async def aclose(self) -> None:
        """End the thread."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    async def _read(self, episode_id: str) -> Recording:
        return await self._in_thread(lambda: self._library.read(episode_id))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _jpeg(recording: Recording, index: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(recording.image(index).rgb_HWC()).save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
    return buffer.getvalue()
