"""Measures the cost of a step's frame as changed tiles, as a raw keyframe and as PNG, on frames of real episodes.

First episodes are played and each frame is recorded over the wire as PNG. Then, without any machine, each frame is
encoded in this process and rebuilt by a client in its own. Each measurement has a new encoder that has seen only the
frame before, so nothing comes from an encoder's cache.
"""

import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median

import numpy as np
import numpy.typing as npt
from PIL import Image

from cuaenv.actions import Action, Wait
from cuaenv.client import StepResult
from cuaenv.frames import TiledImage
from envd.api.convert_results import frame_message
from envd.bench.playing import max_steps_of, play
from envd.bench.rebuilding import ClientProcess, open_client
from envd.bench.report import BenchFailed, BenchReport, Check, Value, exempt_without_guests, figures_of, kib
from envd.bench.session import BenchSession, Steps
from envd.guest.display.encoder import FrameEncoder
from envd.guest.display.frames import Frame
from envd.guest.observation import EncodedFrame, Encoding, ObservationOptions
from envd.tasks.model import Task

#: The targets are for at least this number of frames.
_TARGET_FRAMES = 20
#: The first round loads code, in this process and in the client's.
_WARM_UPS = 1
_KINDS = ("png", "delta", "keyframe")
_RAW = ObservationOptions(encoding=Encoding.RAW_ZSTD)

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The frames of one episode."""

    task_id: str
    frames_HWC: tuple[Pixels, ...]
    """Screens before the first step and after each, with the pointer drawn in."""

    @property
    def step_count(self) -> int:
        return len(self.frames_HWC) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one frame in one encoding."""

    encode_ms: float
    rebuild_ms: float
    size_bytes: int

    @property
    def total_ms(self) -> float:
        """Both ends."""
        return self.encode_ms + self.rebuild_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCost:
    """Cost of the frame of one step in each encoding."""

    png: Cost
    delta: Cost
    keyframe: Cost
    has_changed: bool = True


@dataclass(slots=True)
class Comparison:
    """Counts rebuilt frames, and those that differ from the recorded ones."""

    rebuilt_count: int = 0
    wrong_count: int = 0

    def add(self, pixels: bytes, expected_HWC: Pixels) -> None:
        self.rebuilt_count += 1
        self.wrong_count += pixels != expected_HWC.tobytes()

    @property
    def check(self) -> Check:
        wrong, count = self.wrong_count, self.rebuilt_count
        found = f"{wrong} of {count} rebuilt frames differ from" if wrong else f"all {count} rebuilt frames equal"
        return Check(
            name="lossless", passed=count > 0 and not wrong, evidence=f"{found} the recorded ones, byte for byte"
        )


def step_count(tasks: Sequence[Task], repetitions: int) -> int:
    return sum(len(task.oracle) for task in tasks) + len(tasks) * (repetitions + _WARM_UPS)


async def record(bench: BenchSession, tasks: Sequence[Task], *, steps: Steps) -> list[Recording]:
    """Play the oracle of each task in an episode of its own, and record every frame."""
    return [await _record(bench, task, steps=steps) for task in tasks]


async def _record(bench: BenchSession, task: Task, *, steps: Steps) -> Recording:
    steps.begin(f"setting up {task.task_id}")
    max_steps = max_steps_of(task, limit=bench.daemon.config.limits.max_steps)
    async with bench.reset(task.task_id, max_steps=max_steps) as episode:
        frames_HWC = [_read_png(episode.observation.data)]
        frame_id = episode.observation.frame_id

        def on_step(actions: tuple[Action, ...], result: StepResult) -> None:
            nonlocal frame_id
            seen = result.observation
            # Playing repeats the observation until two are equal. That is not a policy's step, and its frame is free.
            if seen.frame_id != frame_id or not all(isinstance(action, Wait) for action in actions):
                frames_HWC.append(_read_png(seen.data))
            frame_id = seen.frame_id
            steps.done(f"playing {task.task_id}")

        await play(episode, task.oracle, runs_guests=bench.runs_guests, on_step=on_step)
    return Recording(task_id=task.task_id, frames_HWC=tuple(frames_HWC))


async def measure_frames(
    conditions: dict[str, object], recordings: Sequence[Recording], *, repetitions: int, steps: Steps
) -> BenchReport:
    """Measure the frame of every step."""
    comparison = Comparison()
    rounds: list[list[FrameCost]] = []
    async with open_client() as client:
        for number in range(-_WARM_UPS, repetitions):
            found: list[FrameCost] = []
            for recording in recordings:
                found += await _measure(client, recording, comparison)
                steps.done("measuring")
            rounds += [found] if number >= 0 else []
    played_count = sum(recording.step_count for recording in recordings)
    if not any(cost.has_changed for cost in rounds[0]):
        raise BenchFailed(f"none of {played_count} steps changed the screen; play tasks that do")
    return frames_report(
        {
            **conditions,
            "tasks": [recording.task_id for recording in recordings],
            "played_step_count": played_count,
            "changed_frame_count": sum(cost.has_changed for cost in rounds[0]),
            "measured_frame_count": len(rounds[0]),
            "repetitions": repetitions,
            "host_load_average_measuring": round(os.getloadavg()[0], 2),
        },
        [_median(costs) for costs in zip(*rounds, strict=True)],
        comparison.check,
    )


async def _measure(client: ClientProcess, recording: Recording, comparison: Comparison) -> list[FrameCost]:
    """Measure the frames of one recording in each encoding; the client rebuilds each frame from the one before."""
    images = [TiledImage.from_rgb(frame_HWC) for frame_HWC in recording.frames_HWC]
    sources = dict(zip((image.image_id for image in images), recording.frames_HWC, strict=True))
    changes = list(pairwise(images))
    await _keyframe(client, images[0], sources, comparison)
    pngs, deltas = [], []
    for before, after in changes:
        pngs.append(_png(sources[after.image_id]))
        deltas.append(await _delta(client, before, after, sources, comparison))
    keyframes = [await _keyframe(client, after, sources, comparison) for _, after in changes]
    return [
        FrameCost(png=png, delta=delta, keyframe=keyframe, has_changed=before.image_id != after.image_id)
        for png, delta, keyframe, (before, after) in zip(pngs, deltas, keyframes, changes, strict=True)
    ]


def _png(source_HWC: Pixels) -> Cost:
    """Encode and decode as peers do: with Pillow's default settings."""
    begin_s = time.perf_counter()
    buffer = io.BytesIO()
    Image.fromarray(source_HWC).save(buffer, "PNG")
    data = buffer.getvalue()
    encoded_s = time.perf_counter()
    _read_png(data)
    return Cost(
        encode_ms=(encoded_s - begin_s) * 1000,
        rebuild_ms=(time.perf_counter() - encoded_s) * 1000,
        size_bytes=len(data),
    )


async def _delta(
    client: ClientProcess, before: TiledImage, after: TiledImage, sources: dict[str, Pixels], comparison: Comparison
) -> Cost:
    source_HWC = sources[after.image_id]
    encoder = FrameEncoder()
    await encoder.encode(_frame(before), _RAW)
    # The display reports where it changed, so only these tiles are cut out and hashed.
    stale = [(index, after.tile_region(index)) for index in after.changed_tiles(before)]
    begin_s = time.perf_counter()
    image = before.with_tiles(
        {
            index: source_HWC[part.y_px : part.y_px + part.height_px, part.x_px : part.x_px + part.width_px].tobytes()
            for index, part in stale
        }
    )
    encoded = await encoder.encode(_frame(image), replace(_RAW, known_image_id=before.image_id))
    return await _sent(client, encoded, source_HWC, comparison, begin_s=begin_s)


async def _keyframe(
    client: ClientProcess, image: TiledImage, sources: dict[str, Pixels], comparison: Comparison
) -> Cost:
    frame, encoder = _frame(image), FrameEncoder()
    begin_s = time.perf_counter()
    encoded = await encoder.encode(frame, _RAW)
    return await _sent(client, encoded, sources[image.image_id], comparison, begin_s=begin_s)


async def _sent(
    client: ClientProcess, encoded: EncodedFrame, source_HWC: Pixels, comparison: Comparison, *, begin_s: float
) -> Cost:
    encode_ms = (time.perf_counter() - begin_s) * 1000
    sent = frame_message(encoded)
    rebuilt = await client.rebuild(sent, wants_pixels=True)
    comparison.add(rebuilt.pixels, source_HWC)
    return Cost(encode_ms=encode_ms, rebuild_ms=rebuilt.rebuild_ms, size_bytes=sent.ByteSize())


def _frame(image: TiledImage) -> Frame:
    return Frame(frame_id=image.image_id, image=image, capture_time=datetime.now(UTC))


def _read_png(data: bytes) -> Pixels:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def _median(costs: Sequence[FrameCost]) -> FrameCost:
    def median_of(encoding: Sequence[Cost]) -> Cost:
        return Cost(
            encode_ms=median([cost.encode_ms for cost in encoding]),
            rebuild_ms=median([cost.rebuild_ms for cost in encoding]),
            size_bytes=encoding[0].size_bytes,
        )

    return FrameCost(
        png=median_of([cost.png for cost in costs]),
        delta=median_of([cost.delta for cost in costs]),
        keyframe=median_of([cost.keyframe for cost in costs]),
        has_changed=costs[0].has_changed,
    )


def frames_report(conditions: dict[str, object], costs: Sequence[FrameCost], lossless: Check) -> BenchReport:
    samples = {f"{kind}_ms": [getattr(cost, kind).total_ms for cost in costs] for kind in _KINDS}
    samples |= {f"{kind}_kib": [kib(getattr(cost, kind).size_bytes) for cost in costs] for kind in _KINDS}
    samples["encode_ms"] = [cost.delta.encode_ms for cost in costs]
    samples["client_rebuild_ms"] = [cost.delta.rebuild_ms for cost in costs]
    changed = [cost.delta for cost in costs if cost.has_changed]
    values: dict[str, Value] = {
        "changed_delta_ms_p50": median([cost.total_ms for cost in changed]),
        "changed_delta_kib_p50": median([kib(cost.size_bytes) for cost in changed]),
        "delta_time_ratio": median(samples["delta_ms"]) / median(samples["png_ms"]),
        "delta_size_ratio": median(samples["delta_kib"]) / median(samples["png_kib"]),
        "lossless": lossless.passed,
    }
    exempt = exempt_without_guests(conditions)
    if len(costs) < _TARGET_FRAMES:
        exempt = exempt or f"{len(costs)} frames; the targets are for at least {_TARGET_FRAMES}"
    return BenchReport(
        benchmark="frames",
        conditions=conditions,
        figures=figures_of("frames", samples, values, exempt=exempt),
        checks=(lossless,),
        samples=samples,
    )
