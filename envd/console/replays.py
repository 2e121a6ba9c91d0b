"""Read recordings for the console, in one thread of its own; another makes videos, one at a time."""

import asyncio
import io
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from envd.base.errors import RetryableError
from envd.console.runs import Facts
from envd.episodes.recording.library import Library, Recording, RecordingSummary
from envd.episodes.recording.video import export_video

T = TypeVar("T")

#: Rows of one page of the list.
PAGE_ROWS = 200
SORT_KEYS = ("time", "task", "run", "pool", "steps", "score", "state", "bytes", "id")
FILTERS = ("pool", "run", "task", "state")
_QUALITY = 85
_VIDEO_MAX_PAUSE_S = 2.0
#: A video takes seconds to minutes.
_VIDEO_RETRY_S = 10.0


class PageReplays:
    """The recordings of a library, as the page needs them."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="replays")
        self._video_executor = ThreadPoolExecutor(1, thread_name_prefix="video")
        self._makes_video = False
        self._closing = False

    async def page(self, query: Mapping[str, str], *, may_see: Callable[[str], bool]) -> Facts:
        """Return the recordings that match a query, at most `PAGE_ROWS`, and how many there are.

        Args:
            query: `offset`; `sort`, one of `SORT_KEYS`, with `-` in front for descending; `text`; and any of `FILTERS`.
            may_see: Whether the caller may see the recordings of an owner.

        Raises:
            ValueError: The query is invalid; for people.
        """
        sort = query.get("sort", "-time")
        offset = int(query.get("offset", "0")) if query.get("offset", "0").isdecimal() else -1
        if sort.removeprefix("-") not in SORT_KEYS or offset < 0:
            raise ValueError(f"malformed query; sort by one of {', '.join(SORT_KEYS)}, with an offset of 0 or more")
        found = await self._in_thread(lambda: [_facts(each) for each in self._library.summaries()])
        owners = {owner for owner in {each["owner"] for each in found} if may_see(owner)}
        found = [each for each in found if each["owner"] in owners]
        return await self._in_thread(lambda: _page(found, query, sort=sort, offset=offset))

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

    async def video(self, episode_id: str, path: Path, *, is_wanted: Callable[[], bool]) -> None:
        """Write an MP4.

        Raises:
            RecordingUnreadable: It has no frames, or is damaged.
            ConfigError: The extra `video` is not installed.
            RetryableError: Another one is being made, or `is_wanted`, which runs in a thread, returned False.
        """

        def progress(_fraction: float) -> None:
            if self._closing or not is_wanted():
                raise RetryableError("the request ended", retry_after_s=_VIDEO_RETRY_S)

        if self._makes_video:
            raise RetryableError("another video is being made; try again later", retry_after_s=_VIDEO_RETRY_S)
        self._makes_video = True
        try:
            recording = await self._read(episode_id)
            await asyncio.get_running_loop().run_in_executor(
                self._video_executor,
                lambda: export_video(recording, path, "mp4", max_pause_s=_VIDEO_MAX_PAUSE_S, progress=progress),
            )
        finally:
            self._makes_video = False

    async def aclose(self) -> None:
        self._closing = True
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._video_executor.shutdown, cancel_futures=True)

    async def _read(self, episode_id: str) -> Recording:
        return await self._in_thread(lambda: self._library.read(episode_id))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _jpeg(recording: Recording, index: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(recording.image(index).rgb_HWC()).save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
    return buffer.getvalue()


def _facts(summary: RecordingSummary) -> Facts:
    meta, end = summary.meta, summary.end or {}
    return {
        "id": meta["episode_id"],
        "task": meta["task_id"],
        "pool": meta["pool"],
        "run": meta["run"],
        "owner": meta["owner"],
        "created": meta["create_time"],
        "time": summary.time_s,
        "ended": bool(end),
        "bytes": summary.size_bytes,
        "state": end.get("state", ""),
        "reason": end.get("reason", ""),
        "steps": end.get("step_count"),
        "score": end.get("score"),
    }


def _page(found: list[Facts], query: Mapping[str, str], *, sort: str, offset: int) -> Facts:
    """Return a page of the recordings that match. Empty filters match all, `no run` those without a run."""
    text = query.get("text", "").strip().lower()
    matching = [
        each
        for each in found
        if all((each[key] or f"no {key}") == query[key] for key in FILTERS if query.get(key))
        and any(text in str(each[key]).lower() for key in ("id", "task", "run", "pool", "owner"))
    ]
    key = sort.removeprefix("-")
    # Those without a value come last in both directions.
    valued = [each for each in matching if each[key] not in (None, "")]
    valued.sort(key=lambda each: each[key], reverse=sort.startswith("-"))
    rows = valued + [each for each in matching if each[key] in (None, "")]
    return {
        "total": len(found),
        "matching": len(rows),
        "recordings": rows[offset : offset + PAGE_ROWS],
        "choices": {key: sorted({each[key] or f"no {key}" for each in found}) for key in FILTERS},
    }
