"""Measure the CPU time of rollouts: slime's rollout code, our plug-in, drawn desktops, an engine without a model.

The daemon and the engine are processes of their own, so this process's CPU time is that of the trainer's side alone.
"""

import base64
import ctypes
import gc
import os
import resource
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cuaenv.client import Click
from cuaenv.frames import TiledImage
from trainer.agent.grammars import grammar
from trainer.agent.loop import AgentEpisode
from trainer.learn import LearnError
from trainer.learn.checkpoint import write_checkpoint
from trainer.learn.daemons import started_daemons
from trainer.learn.server import GenerateServer, answer_of
from trainer.learn.settings import Desktops, Settings
from trainer.learn.slime_job import SlimeRollouts, slime_args, use_slime, write_tasks
from trainer.slime.environments import SampleEnvironments
from trainer.slime.generate import run_sample
from trainer.slime.rollout import Rollout
from trainer.slime.samples import facts_of, flatten, is_void

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SCREEN_PX: Final = (1280, 800)
_PICTURE_BYTES: Final = _SCREEN_PX[0] * _SCREEN_PX[1] * 3
_TOKEN_PX: Final = 32
_TASK: Final = "fake/count-to-five"
#: Episodes that run one at a time, for the cost of each turn.
_SINGLE_EPISODES: Final = 3
#: Generate functions by the suffix of their figures: drawn screens; with a photograph as background; with a moving one.
_KINDS: Final = {"": "generate_drawn", "_busy": "generate_busy", "_moving": "generate_moving"}
#: Fields of the JSON output that have a goal, with its largest value.
GOALS: Final[Mapping[str, float]] = {
    "cpu_ms_per_turn": 10,
    "cpu_ms_per_turn_busy": 25,
    "loop_ms_per_turn": 3,
    "loop_ms_per_turn_busy": 4,
    "cpu_turn_30_over_2": 1.5,
    "bytes_per_turn_over_picture": 1.2,
    "memory_over_pictures": 3,
}


@dataclass(slots=True)
class _Marks:
    """CPU times and memory at each reply of the rollouts that are measured, and the cost of composing pictures."""

    cpu_s: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    composing_s: float = 0.0


_marks = _Marks()


def measure(slime_home: Path, *, episodes: int, turns: int) -> dict[str, Any]:
    """Return the figures, by the names of `trainer bench rollout --json`. Raises: LearnError."""
    use_slime(slime_home)
    desktops = Desktops(reaction_ms=0)
    settings = Settings(screen_px=_SCREEN_PX, workers=1, machines=episodes, size="tiny", desktops=desktops)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        checkpoint = write_checkpoint(root / "model", vocabulary=[_reply(number) for number in range(64)] * 8)
        with started_daemons(root / "daemons", settings) as hosts, _engine(checkpoint) as (port, sent):
            job = _job(root, checkpoint, hosts[0], port, episodes=episodes, turns=turns)
            kinds = {
                suffix: _figures(job, sent, episodes=episodes, turns=turns, generate=generate)
                for suffix, generate in _KINDS.items()
            }
    figures = {f"{name}{kind}": value for kind, each in kinds.items() for name, value in each.items()}
    return {
        "conditions": {"episodes": episodes, "turns": turns, "screen_px": _SCREEN_PX, "cores": os.cpu_count()},
        "results": {**figures, "scaling_4_workers": None},
        "goals": dict(GOALS),
    }


def _job(root: Path, checkpoint: Path, host: str, port: int, *, episodes: int, turns: int) -> SlimeRollouts:
    agent = {
        "max_turns": turns,
        "image_max_pixels": _SCREEN_PX[0] * _SCREEN_PX[1],
        "reply_tokens": 96,
        "prompt_tokens": 4096,
        "context_tokens": 8192 + turns * 2048,
    }
    args = slime_args(
        {"hosts": [host], "group": "off", "agent": agent},
        hf_checkpoint=str(checkpoint),
        prompt_data=str(write_tasks(root / "tasks.jsonl", [_TASK] * episodes)),
        n_samples_per_prompt=1,
        rollout_max_response_len=96,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
    )
    return SlimeRollouts(args)


def _figures(job: SlimeRollouts, sent: Any, *, episodes: int, turns: int, generate: str) -> dict[str, float]:
    """Roll out episodes one at a time, then all at once; return the figures of one kind of screen."""
    job.args.custom_generate_function_path = f"{__name__}.{generate}"
    _roll_out(job, 1)  # imports, tables and pools are made on first use
    late, growth = [], []
    for _ in range(_SINGLE_EPISODES):
        _roll_out(job, 1)
        costs = [after - before for before, after in pairwise(_marks.cpu_s)]
        # Between the replies k and k + 1: turn k + 1.
        late.append((statistics.median(costs[-5:]), statistics.median(costs[:5])))
        growth.append(_marks.resident_bytes[-1] - _marks.resident_bytes[0])
    sent[:] = [0, 0, 0]
    cpu_s, kernel_s, loop_s = _roll_out(job, episodes)
    count = episodes * turns
    return {
        "cpu_ms_per_turn": cpu_s / count * 1e3,
        "kernel_ms_per_turn": kernel_s / count * 1e3,
        "loop_ms_per_turn": loop_s / count * 1e3,
        f"cpu_turn_{turns}_over_2": statistics.median(last / first for last, first in late),
        "bytes_per_turn_over_picture": sent[0] / max(1, sent[1]),
        "picture_bytes": sent[1] / max(1, sent[2]),
        "memory_over_pictures": statistics.median(growth) / ((turns - 1) * _PICTURE_BYTES),
    }


def _roll_out(job: SlimeRollouts, episodes: int) -> tuple[float, float, float]:
    """Return CPU times: of the process, its part in the kernel, of the event loop. Raises: LearnError."""
    global _marks  # noqa: PLW0603 -- slime calls functions by their path, so the rollouts find it here
    _marks = _Marks()
    # Otherwise memory that an earlier episode freed would hide the growth of this one.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    job.args.rollout_batch_size = job.args.over_sampling_batch_size = job.args.global_batch_size = episodes
    before, before_loop_s = os.times(), _loop_s()
    samples = flatten(job.rollout().samples)
    after, after_loop_s = os.times(), _loop_s()
    for sample in samples:
        if is_void(sample):
            raise LearnError(f"rollout of {_TASK}: it is void: {facts_of(sample)}")
    # Pictures are composed in the loop.
    kernel_s = after.system - before.system
    cpu_s = after.user - before.user + kernel_s - _marks.composing_s
    return cpu_s, kernel_s, after_loop_s - before_loop_s - _marks.composing_s


def _loop_s() -> float:
    async def thread_s() -> float:
        return time.thread_time()

    seconds: float = import_module("slime.utils.async_utils").run(thread_s())
    return seconds


async def generate_drawn(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run one sample as `trainer.slime.generate.generate`, measured."""
    return await _run(args, sample, sampling_params, evaluation, _MeasuredRollout)


async def generate_busy(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run one sample like `generate_drawn`, with a photograph in place of the desktop's plain background."""
    return await _run(args, sample, sampling_params, evaluation, _BusyRollout)


async def generate_moving(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run one sample like `generate_busy`; the photograph moves at each turn, so that no row of pixels recurs."""
    return await _run(args, sample, sampling_params, evaluation, _MovingRollout)


async def _run(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool, rollout_type: type[Rollout]
) -> Any:
    result = await run_sample(args, sample, sampling_params, evaluation=evaluation, rollout_type=rollout_type)
    # slime gives them to the learner; kept, those of 256 episodes would not fit into memory.
    sample.multimodal_train_inputs = None
    return result


class _MeasuredRollout(Rollout):
    async def _call_engine(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        _marks.cpu_s.append(time.process_time() - _marks.composing_s)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        _marks.resident_bytes.append(pages * resource.getpagesize())
        return await super()._call_engine(payload)


class _BusyRollout(_MeasuredRollout):
    shift_px = 0

    def wrap(self, environments: SampleEnvironments, episode: AgentEpisode) -> AgentEpisode:  # noqa: ARG002
        return _BusyEpisode(episode, self.shift_px)  # type: ignore[return-value]


class _MovingRollout(_BusyRollout):
    shift_px = 37


class _BusyEpisode:
    """An episode with a photograph as its background, which may move at each turn."""

    def __init__(self, episode: AgentEpisode, shift_px: int) -> None:
        self._episode = episode
        self._shift_px = shift_px
        self._turn = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    @cached_property
    def observation(self) -> Any:
        return self._busy(self._episode.observation)

    async def step(self, *actions: Any, **options: Any) -> Any:
        result = await self._episode.step(*actions, **options)
        return replace(result, observation=self._busy(result.observation))

    def _busy(self, observation: Any) -> Any:
        import numpy as np  # noqa: PLC0415

        started_s = time.thread_time()
        self._turn += 1
        rgb_HWC = observation.tiles.rgb_HWC()
        # Each row of the background has one colour, which the last column shows.
        is_background = (rgb_HWC == rgb_HWC[:, -1:]).all(axis=2, keepdims=True)
        photograph_HWC = np.roll(_photograph(), self._shift_px * self._turn, axis=(0, 1))
        tiles = TiledImage.from_rgb(np.where(is_background, photograph_HWC, rgb_HWC))
        busy = replace(observation, tiles=tiles, image_id=tiles.image_id)
        _marks.composing_s += time.thread_time() - started_s
        return busy


_photographs: "list[npt.NDArray[np.uint8]]" = []


def _photograph() -> "npt.NDArray[np.uint8]":
    """Return smooth colours with the noise of a camera: about 1 MB as PNG."""
    import numpy as np  # noqa: PLC0415

    if not _photographs:
        width, height = _SCREEN_PX
        rng = np.random.default_rng(0)
        y, x = np.mgrid[:height, :width]
        waves = [np.sin(x / 97 + y / 211), np.sin(y / 83), np.cos((x + y) / 150)]
        colours_HWC = 128 + 80 * np.stack(waves, axis=-1) + rng.normal(0, 0.8, (height, width, 1))
        _photographs.append(np.clip(colours_HWC, 0, 255).astype(np.uint8))
    return _photographs[0]


def _reply(number: int) -> str:
    """Return a reply that changes the screen: every other click presses the task's button."""
    point = (640, 125) if number % 2 else (40 + number * 31 % 900, 60 + number * 53 % 700)
    return grammar("qwen3-vl").render([Click(*point)])


class _Engine(GenerateServer):
    """Answers at once, and counts the bytes of requests, of their newest pictures, and requests."""

    def __init__(self, checkpoint: str, sent: Any) -> None:
        super().__init__()
        from transformers import AutoTokenizer  # noqa: PLC0415 -- seconds

        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self._sent = sent

    async def generate(self, payload: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Answer with a click."""
        images = payload.get("image_data") or ["", ""][:0]
        sizes = [_size_px(uri) for uri in images]
        tokens = sum(width // _TOKEN_PX * (height // _TOKEN_PX) for width, height in sizes)
        limit = payload["sampling_params"]["max_new_tokens"]
        ids = self._tokenizer.encode(_reply(len(images)) + "<|im_end|>", add_special_tokens=False)[:limit]
        if limit > 1:  # a request for one token is the plug-in's check of the engine
            self._sent[0] += sum(map(len, images)) + 8 * len(payload["input_ids"])
            self._sent[1] += len(images[-1])
            self._sent[2] += 1
        return answer_of(
            self._tokenizer.decode(ids),
            ids,
            [-0.5] * len(ids),
            finish="stop",
            prompt_tokens=len(payload["input_ids"]) - len(images) + tokens,
            weight_version="1",
        )


def _size_px(uri: str) -> tuple[int, int]:
    """Return (width, height) from a PNG's header."""
    header = base64.b64decode(uri.partition(",")[2][:32])
    width, height = struct.unpack(">II", header[16:24])
    return width, height


@contextmanager
def _engine(checkpoint: Path) -> Iterator[tuple[int, Any]]:
    """Yield the port of an engine in a process of its own, and its counters."""
    context = get_context("spawn")
    sent, (ours, theirs) = context.Array("Q", 3), context.Pipe()
    process = context.Process(target=_serve, args=(str(checkpoint), sent, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv(), sent
    finally:
        ours.send(None)
        process.join()


def _serve(checkpoint: str, sent: Any, pipe: Any) -> None:
    with _Engine(checkpoint, sent) as engine:
        pipe.send(engine.ports[0])
        pipe.recv()
