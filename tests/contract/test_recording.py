"""Recordings of drawn episodes: what they contain, what damages them, and that they never harm an episode."""

import base64
import errno
import html
import io
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
from PIL import Image

from cuaenv.actions import Click, Done, Move, TypeText
from cuaenv.results import UnrecordedRequest
from envd.base.config import SettlePolicy
from envd.base.errors import ConfigError
from envd.desktop.desktop import Desktop
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.episode import Episode
from envd.episodes.events import EpisodeObserver
from envd.episodes.recording.library import Library, Recording
from envd.episodes.recording.page import write_page
from envd.episodes.recording.recorder import Recorder
from envd.episodes.recording.records import Kind, RecordingUnreadable, open_file, packed_json, read_records
from envd.episodes.recording.video import VideoFormat, export_video, shown_for_s
from envd.episodes.recording.writer import RecordingDirectory
from envd.episodes.types import ResetCommand, StepCommand
from tests.support.command import CommandOutput, run_envd
from tests.support.server import FakeServer, serve_fake

NO_PIXELS = ObservationOptions(encoding=Encoding.NONE)
PLENTY = 1 << 30


class Recorded(NamedTuple):
    server: FakeServer
    recorder: Recorder
    failures: list[bool]

    async def play(self, *actions: Any, request: str = "1") -> str:
        """Open an episode, perform each action as a step, score and close it; return its id."""
        command = ResetCommand(
            request_id=f"reset-{request}",
            task_id="fake/save-note",
            settle=SettlePolicy(quiet_ms=20, max_ms=2000),
            observe=NO_PIXELS,
        )
        episode_id = (await self.server.service.reset(command)).episodes[0].episode_id
        for index, action in enumerate(actions):
            step = StepCommand(
                request_id=f"step-{index}", episode_id=episode_id, step_index=index, actions=(action,),
                observe=NO_PIXELS,
            )  # fmt: skip
            await self.server.service.step(step)
        await self.server.service.evaluate(episode_id, request_id="e", fingerprint=b"")
        await self.server.service.close(episode_id)
        return episode_id


@asynccontextmanager
async def recorded(directory: Path, *, limit_bytes: int = PLENTY, min_free_bytes: int = 0) -> AsyncIterator[Recorded]:
    """Serve drawn desktops and record their episodes; after the block the recordings are complete."""
    failures: list[bool] = []
    async with serve_fake(size=1) as server:
        recorder = Recorder(
            server.service,
            RecordingDirectory(directory, limit_bytes=limit_bytes, min_free_bytes=min_free_bytes),
            max_rate_hz=20,
            on_failed=failures.append,
        )
        yield Recorded(server, recorder, failures)
        await server.service.aclose()
        await recorder.aclose()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


async def test_a_recording_has_the_screen_after_every_step_the_score_and_the_end(directory: Path) -> None:
    screens: list[tuple[str, tuple[int, int] | None]] = []

    class Screens(EpisodeObserver):
        """Remembers what the screen showed after each step."""

        def stepped(self, episode: Episode, step: Any) -> None:
            assert step.frame is not None
            at = step.frame.pointer and (step.frame.pointer.x_px, step.frame.pointer.y_px)
            screens.append((step.frame.frame_id, at))

    async with recorded(directory) as running:
        running.server.service.events.add(Screens())
        episode_id = await running.play(Click(379, 311), TypeText("Hi"), Move(5, 6), Done("ok"))
    recording = Library(directory).read(episode_id)
    assert running.failures == [False]
    assert recording.meta["task_id"] == "fake/save-note"
    assert [step["actions"] for step in recording.steps] == [
        ["click 379,311"], ["type 'Hi'"], ["move 5,6"], ["done 'ok'"],
    ]  # fmt: skip
    assert recording.end is not None
    assert (recording.end["state"], recording.end["reason"], recording.end["score"]) == (
        "terminated",
        "AGENT_DONE",
        0.0,
    )
    shown = [(image.image_id, frame.pointer_px) for frame, image in recording.images()]
    positions = [shown.index(screen) for screen in screens]
    assert positions == sorted(positions)
    assert [frame.is_key for frame in recording.frames].count(True) == 1
    (summary,) = Library(directory).summaries()
    assert (summary.meta["episode_id"], summary.end) == (episode_id, recording.end)
    assert os.stat(directory / f"{episode_id}.rec").st_mode & 0o077 == 0


async def test_frames_are_rebuilt_in_any_order(directory: Path) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311), TypeText("a"), TypeText("b"), Click(819, 100))
    in_order = [image.image_id for _, image in Library(directory).read(episode_id).images()]
    recording = Library(directory).read(episode_id)
    assert len(in_order) > 3
    for index in (2, 0, len(in_order) - 1, 1):
        assert recording.image(index).image_id == in_order[index]
    with pytest.raises(RecordingUnreadable, match=rf"frame 999 not found; it has {len(in_order)} frames"):
        recording.image(999)


async def test_a_frame_of_a_file_that_was_dropped_or_damaged_after_it_was_opened_is_an_error(directory: Path) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311), TypeText("Hi"))
    recording = Library(directory).read(episode_id)
    path = directory / f"{episode_id}.rec"
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(RecordingUnreadable, match=rf"recording {episode_id}: a frame is damaged"):
        recording.image(0)
    path.unlink()
    with pytest.raises(RecordingUnreadable, match=rf"recording {episode_id}: not in .*; .* dropped for newer ones"):
        recording.image(0)


async def test_a_torn_or_damaged_file_is_read_up_to_the_damage(directory: Path) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311), TypeText("Hi"))
    path = directory / f"{episode_id}.rec"
    whole = path.read_bytes()
    with open_file(path) as file:
        ends = [record.end for record in read_records(file, name="x")]
    for cut in range(ends[0], len(whole), max(1, len(whole) // 50)):
        path.write_bytes(whole[:cut])
        with open_file(path) as file:
            assert [record.end for record in read_records(file, name="x")] == [end for end in ends if end <= cut]
        (summary,) = Library(directory).summaries()
        assert summary.end is None
        assert Recording(path).end is None or cut >= ends[-1]
    damaged = bytearray(whole)
    damaged[ends[1] + 30] ^= 1
    path.write_bytes(damaged)
    assert (Recording(path).end, len(Recording(path).frames)) == (None, 1)


@pytest.mark.parametrize("content", [b"", b"ENVDREC1", b"not a recording", b"ENVDREC1" + b"\xff" * 100])
def test_an_unreadable_recording_is_an_error_and_not_in_the_list(directory: Path, content: bytes) -> None:
    directory.mkdir()
    (directory / "ep-1.rec").write_bytes(content)
    with pytest.raises(RecordingUnreadable, match=r"recording ep-1: .+; delete the file"):
        Library(directory).read("ep-1")
    assert Library(directory).summaries() == []


@pytest.mark.parametrize("episode_id", ["ep-2", "../secret", "", "a/b", "x" * 100])
def test_an_unknown_recording_is_an_error(directory: Path, episode_id: str) -> None:
    directory.mkdir()
    (directory.parent / "secret.rec").write_bytes(b"ENVDREC1")
    with pytest.raises(RecordingUnreadable):
        Library(directory).read(episode_id)


def failing_after(count: int, real: Callable[..., int]) -> Callable[..., int]:
    """Return a disk that is full after some writes."""
    writes = 0

    def write(*args: Any) -> int:
        nonlocal writes
        writes += 1
        if writes > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    return write


async def test_a_full_disk_ends_recordings_and_no_episode(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded(directory) as running:
        real = RecordingDirectory.make_room
        monkeypatch.setattr(RecordingDirectory, "make_room", failing_after(3, real))  # type: ignore[arg-type]
        episode_id = await running.play(Click(379, 311), TypeText("Hi"), TypeText("Ho"))
        await running.play(Click(379, 311), request="2")
        await running.recorder._tasks.join()
        # Recording starts again by itself once there is space.
        monkeypatch.undo()
        later = await running.play(Click(379, 311), request="3")
    assert running.failures[:2] == [False, True]
    assert running.failures[-1] is False
    assert Library(directory).read(episode_id).end is None
    assert Library(directory).read(later).end is not None


async def test_space_is_left_on_the_disk_for_machines(directory: Path) -> None:
    async with recorded(directory, min_free_bytes=shutil.disk_usage("/").total * 1000) as running:
        await running.play(Click(379, 311))
    assert running.failures == [False, True]


async def test_the_oldest_recordings_are_dropped_first(directory: Path) -> None:
    directory.mkdir()
    old = [directory / f"ep-old{number}.rec" for number in range(3)]
    for number, path in enumerate(old):
        path.write_bytes(b"x" * 400_000)
        os.utime(path, (1000 + number, 1000 + number))
    async with recorded(directory, limit_bytes=1_200_000) as running:
        episode_id = await running.play(Click(379, 311))
    assert running.failures == [False]
    assert not old[0].exists()
    assert old[2].exists()
    assert Library(directory).read(episode_id).end is not None


async def test_a_recording_that_fills_the_limit_alone_ends_early(directory: Path) -> None:
    async with recorded(directory, limit_bytes=4000) as running:
        await running.play(Click(379, 311))
    assert running.failures == [False, True]


async def test_a_recording_of_an_earlier_daemon_is_continued(directory: Path) -> None:
    target = RecordingDirectory(directory, limit_bytes=PLENTY, min_free_bytes=0)
    directory.mkdir()
    file = target.open("ep-1", packed_json(Kind.META, 1.0, {"episode_id": "ep-1"}))
    file.append(packed_json(Kind.STEP, 2.0, {"index": 0, "actions": []}) + b"torn")
    file.close()
    file = target.open("ep-1", packed_json(Kind.META, 3.0, {"episode_id": "ep-1", "again": True}))
    file.append(packed_json(Kind.STEP, 4.0, {"index": 1, "actions": []}))
    file.finish(5.0, {"state": "terminated"})
    recording = Library(directory).read("ep-1")
    assert recording.meta == {"episode_id": "ep-1"}
    assert [step["index"] for step in recording.steps] == [0, 1]
    assert recording.end == {"state": "terminated"}


def test_pauses_are_cut_and_short_frames_stay_visible() -> None:
    assert shown_for_s([0.0, 0.01, 1.0, 61.0], max_pause_s=2.0, speed=1.0) == [0.04, 0.99, 2.0, 2.0]
    assert shown_for_s([0.0, 60.0], max_pause_s=2.0, speed=4.0) == [0.5, 2.0]


@pytest.mark.parametrize("video_format", get_args(VideoFormat))
async def test_a_recording_becomes_a_video_of_its_frames(
    directory: Path, tmp_path: Path, video_format: VideoFormat
) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311), TypeText("Hello"), Click(819, 100))
    recording = Library(directory).read(episode_id)
    path = tmp_path / "video"
    done: list[float] = []
    export_video(recording, path, video_format, max_pause_s=0.5, progress=done.append)
    assert done[-1] == 1.0
    last_HWC = recording.image(len(recording.frames) - 1).rgb_HWC().astype(int)
    if video_format == "gif":
        with Image.open(path) as gif:
            assert (gif.format, gif.size) == ("GIF", (800, 500))
            gif.seek(gif.n_frames - 1)  # type: ignore[attr-defined]
            shown_HWC = np.asarray(gif.convert("RGB").resize((1280, 800))).astype(int)
    else:
        import av

        with av.open(str(path)) as video:
            *_, frame = video.decode(video=0)
            shown_HWC = frame.to_ndarray(format="rgb24").astype(int)
            assert video.format.name.split(",")[0] in {"mov", "matroska"}
            assert (video.duration or 0) / av.time_base >= frame.time
    assert shown_HWC.shape == last_HWC.shape
    # The pointer and the codec differ a little.
    assert np.abs(shown_HWC - last_HWC).mean() < 12
    assert list(tmp_path.glob(".*")) == []


async def test_the_command_exports_a_recording(directory: Path, tmp_path: Path) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311))
    path = tmp_path / "a.gif"

    def export(*words: str, **variables: str) -> CommandOutput:
        return run_envd("episodes", "export", *words, "--format", "gif", "--out", str(path), **variables)

    done = export(episode_id, ENVD_RECORDING__DIRECTORY=str(directory))
    assert done.status == 0, done.err
    assert done.out.startswith(f"wrote {path}: ")
    with Image.open(path) as gif:
        assert gif.format == "GIF"
    unknown = export("ep-0", "--directory", str(directory))
    assert unknown.status == 1
    assert f"recording ep-0: not in {directory}; it was not recorded, or dropped for newer ones" in unknown.err
    nowhere = export(episode_id)
    assert nowhere.status == 2
    assert "no directory of recordings; pass --directory" in nowhere.err


async def test_the_command_exports_a_page_that_shows_each_step(directory: Path, tmp_path: Path) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311), TypeText("<script>alert(1)</script>"))
    path = tmp_path / "a.html"
    done = run_envd(
        "episodes", "export", episode_id, "--format", "html", "--out", str(path), "--directory", str(directory)
    )
    assert done.status == 0, done.err
    page = path.read_text()
    titles = [html.unescape(title) for title in re.findall(r"<h2>(.*?)</h2>", page)]
    assert titles == ["start", "step 1: click 379,311", "step 2: type '<script>alert(1)</script>'"]
    assert "<script" not in page
    assert re.findall(r"<dt>(.*?)</dt>", page).count("score") == 1
    assert "[{" not in page
    screens = [base64.b64decode(text) for text in re.findall(r'src="data:image/webp;base64,(.*?)"', page)]
    sizes = []
    for screen in screens:
        with Image.open(io.BytesIO(screen)) as image:
            sizes.append(image.size)
    assert sizes == [(1280, 800)] * 3
    assert screens[1] != screens[2]


async def test_a_recording_and_its_page_name_what_the_web_recording_did_not_have(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = UnrecordedRequest(kind="not_recorded", method="GET", url="https://example.org/?<b>")
    monkeypatch.setattr(Desktop, "take_unrecorded", lambda _: (missing,))
    async with recorded(directory) as running:
        episode_id = await running.play(Move(5, 6))
    recording = Library(directory).read(episode_id)
    assert recording.steps[0]["unrecorded"] == ["not recorded: GET https://example.org/?<b>"]
    write_page(recording, tmp_path / "a.html", progress=lambda _: None)
    assert "settled; not recorded: GET https://example.org/?&lt;b&gt;</p>" in (tmp_path / "a.html").read_text()


async def test_an_export_that_fails_leaves_no_file(directory: Path, tmp_path: Path) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311))
    recording = Library(directory).read(episode_id)
    with pytest.raises(FileNotFoundError):
        export_video(recording, tmp_path / "none" / "a.gif", "gif", max_pause_s=1.0)
    recording.frames.clear()
    with pytest.raises(RecordingUnreadable, match="it has no frames"):
        export_video(recording, tmp_path / "a.gif", "gif", max_pause_s=1.0)
    assert not (tmp_path / "a.gif").exists()


async def test_without_the_package_only_gif_is_written(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recorded(directory) as running:
        episode_id = await running.play(Click(379, 311))
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    recording = Library(directory).read(episode_id)
    with pytest.raises(ConfigError, match=r"the package av is missing; install envd-trainer\[video\]"):
        export_video(recording, tmp_path / "a.mp4", "mp4", max_pause_s=1.0)
    export_video(recording, tmp_path / "a.gif", "gif", max_pause_s=1.0)
