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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from cuaenv.client import Click
from cuaenv.frames import TiledImage
from tests.tools.learning.wrapped import WrappedEpisode
from trainer.agent.grammars import grammar
from trainer.agent.loop import AgentEpisode
from trainer.agent.types import Conversation, Reply, Trajectory
from trainer.learn import LearnError
from trainer.learn.checkpoint import write_checkpoint
from trainer.learn.daemons import started_daemons
from trainer.learn.server import GenerateServer, answer_of, file_of
from trainer.learn.settings import Settings
from trainer.learn.slime_job import SlimeRollouts, slime_args, use_slime, write_tasks
from trainer.slime.job import job_of
from trainer.slime.play.rollout import Rollout
from trainer.slime.play.samples import facts_of, flatten, is_void
from trainer.tokens.conversation import Engine
from trainer.tokens.rows import Row
from trainer.workers import WorkerProcess

_SCREEN_PX: Final = (1280, 800)
_PIXELS: Final = _SCREEN_PX[0] * _SCREEN_PX[1]
_HOME: Final = "SLIME_HOME"
_TASK: Final = "fake/count-to-five"
#: Episodes that run one at a time, for the cost of each turn.
_SINGLE_EPISODES: Final = 3
_STOP_S: Final = 10.0


@dataclass(slots=True)
class _Measured:
    """What the rollouts of this process record."""

    is_busy: bool = False
    """Whether screens get a photograph as background."""
    is_single: bool = False
    """Whether one episode runs, whose replies are recorded."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of the process at each reply."""
    resident_bytes: list[int] = field(default_factory=list)
    """Memory of the process at each reply."""
    composing_s: float = 0.0
    """CPU time of composing busy screens, which is not the trainer's."""


_measured = _Measured()


def measure(slime_home: Path, *, episodes: int, turns: int, picture_dir: str = "", workers: int = 0) -> dict[str, Any]:
    """Return the report of `python -m tests.tools.learning rollout-bench --json`. Raises: LearnError.

    Args:
        workers: Compare so many `envd.workers` with slime's one process instead of measuring the turns.
    """
    # As Ray does for slime's RolloutManager, which has one CPU. PyTorch reads it when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use_slime(slime_home)
    os.environ[_HOME] = str(slime_home)
    # Workers choose daemons independently: without spare machines, some episodes would wait until others have ended.
    machines = -(-2 * episodes // workers) if workers else episodes
    settings = Settings(screen_px=_SCREEN_PX, workers=max(1, workers), machines=machines)
    conditions = {"episodes": episodes, "turns": turns, "screen_px": _SCREEN_PX, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        checkpoint = write_checkpoint(root / "model", vocabulary=[_reply(number) for number in range(64)] * 8)
        with started_daemons(root / "daemons", settings) as hosts, _engine(checkpoint, workers) as (port, sent):
            agent = {"max_turns": turns, "image_max_pixels": _PIXELS, "reply_tokens": 96, "prompt_tokens": 4096}
            agent["context_tokens"] = 8192 + turns * 2048
            args = slime_args(
                {"hosts": hosts, "group": "off", "picture_dir": picture_dir, "agent": agent},
                hf_checkpoint=str(checkpoint),
                prompt_data=str(write_tasks(root / "tasks.jsonl", [_TASK] * episodes)),
                n_samples_per_prompt=1,
                rollout_max_response_len=96,
                custom_generate_function_path=f"{__name__}.generate",
                sglang_router_ip="127.0.0.1",
                sglang_router_port=port,
            )
            job = SlimeRollouts(args)
            if workers:
                return {
                    "conditions": {**conditions, "workers": workers},
                    "results": _scaling(job, workers, episodes=episodes, turns=turns),
                }
            drawn = _figures(job, sent, episodes=episodes, turns=turns, is_busy=False)
            busy = _figures(job, sent, episodes=episodes, turns=turns, is_busy=True)
    return {"conditions": conditions, "results": {**drawn, **{f"{name}_busy": value for name, value in busy.items()}}}


def _scaling(job: SlimeRollouts, count: int, *, episodes: int, turns: int) -> dict[str, float]:
    """Return turns per second with no and with `count` workers, and what one core for each process would allow."""
    found = dict[str, float]()
    for workers in (0, count):
        job.args.envd = {**job.args.envd, "workers": workers}
        _roll_out(job, episodes, is_busy=False)
        gc.freeze()  # each rollout begins with a collection
        pids = [os.getpid(), *(job_of(job.args).workers(job.args).pids() if workers else ())]
        before, started_s = [*map(_cpu_s, pids)], time.monotonic()
        _roll_out(job, episodes, is_busy=False)
        seconds = time.monotonic() - started_s
        used = [_cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
        found |= {
            f"turns_per_s_{workers}_workers": episodes * turns / seconds,
            f"turns_per_busiest_cpu_s_{workers}_workers": episodes * turns / max(used),
            f"slime_cpu_ms_per_turn_{workers}_workers": used[0] * 1e3 / (episodes * turns),
        }
    for name in ("turns_per_s", "turns_per_busiest_cpu_s"):
        found[f"scaling_{name}"] = found[f"{name}_{count}_workers"] / found[f"{name}_0_workers"]
    return found


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _figures(job: SlimeRollouts, sent: Any, *, episodes: int, turns: int, is_busy: bool) -> dict[str, float]:
    """Roll out episodes one at a time, then all at once; return the figures of one kind of screen."""
    _roll_out(job, 1, is_busy=is_busy)  # imports, tables and pools are made on first use
    ratios, growth = [], []
    for _ in range(_SINGLE_EPISODES):
        _roll_out(job, 1, is_busy=is_busy)
        costs = [after - before for before, after in pairwise(_measured.cpu_s)]
        ratios.append(statistics.median(costs[-5:]) / statistics.median(costs[:5]))
        growth.append(_measured.resident_bytes[-1] - _measured.resident_bytes[0])
    # The first rollout of a job takes the memory of its tensors from the kernel; later ones use it again.
    _roll_out(job, episodes, is_busy=is_busy)
    sent[:] = [0, 0, 0]
    cpu_s, kernel_s, loop_s = _roll_out(job, episodes, is_busy=is_busy)
    per_turn_ms = 1e3 / (episodes * turns)
    return {
        "cpu_ms_per_turn": cpu_s * per_turn_ms,
        "kernel_ms_per_turn": kernel_s * per_turn_ms,
        "loop_ms_per_turn": loop_s * per_turn_ms,
        f"cpu_turn_{turns}_over_2": statistics.median(ratios),
        "bytes_per_turn_over_picture": sent[0] / sent[1],
        "picture_bytes": sent[1] / sent[2],
        "memory_over_pictures": statistics.median(growth) / ((turns - 1) * _PIXELS * 3),
    }


def _roll_out(job: SlimeRollouts, episodes: int, *, is_busy: bool) -> tuple[float, float, float]:
    """Return CPU times: of the process, its part in the kernel, of the event loop. Raises: LearnError."""
    global _measured  # noqa: PLW0603 -- slime calls `generate` by its path, so it finds this here
    _measured = _Measured(is_busy, episodes == 1)
    # Otherwise memory that an earlier episode freed would hide the growth of this one.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    job.args.rollout_batch_size = job.args.over_sampling_batch_size = job.args.global_batch_size = episodes
    before, before_loop_s = os.times(), _loop_s()
    samples = flatten(job.rollout().samples)
    after, loop_s = os.times(), _loop_s() - before_loop_s
    for sample in samples:
        if is_void(sample):
            raise LearnError(f"rollout of {_TASK}: it is void: {facts_of(sample)}")
    kernel_s = after.system - before.system
    # Screens are composed in the loop.
    return after.user - before.user + kernel_s - _measured.composing_s, kernel_s, loop_s - _measured.composing_s


def _loop_s() -> float:
    async def thread_s() -> float:
        return time.thread_time()

    seconds: float = import_module("slime.utils.async_utils").run(thread_s())
    return seconds


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run one sample as `trainer.slime.hooks.generate`, measured."""
    result = await job_of(args).play_sample(
        args, sample, sampling_params, evaluation=evaluation, rollout_type=_MeasuredRollout
    )
    # slime gives them to the learner; kept, those of 256 episodes would not fit into memory.
    sample.multimodal_train_inputs = None
    return result


class _MeasuredEngine:
    """An engine before each of whose replies the memory and the time that were used are noted."""

    def __init__(self, engine: Engine) -> None:
        self.encode = engine.encode
        self._engine = engine

    async def sample(self, row: Row, *, limit: int) -> Reply:
        """See `Engine`."""
        if _measured.is_single:
            _measured.cpu_s.append(time.process_time() - _measured.composing_s)
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            _measured.resident_bytes.append(pages * resource.getpagesize())
        return await self._engine.sample(row, limit=limit)


class _MeasuredRollout(Rollout):
    def __init__(self, *given: Any, **named: Any) -> None:
        # A worker lacks slime.
        use_slime(Path(os.environ[_HOME]))
        super().__init__(*given, **named)

    def new_engine(self, params: Mapping[str, Any]) -> Engine:
        return _MeasuredEngine(super().new_engine(params))

    async def play_episode(self, episode: AgentEpisode, conversation: Conversation) -> Trajectory:
        return await super().play_episode(_BusyEpisode(episode) if _measured.is_busy else episode, conversation)


class _BusyEpisode(WrappedEpisode):
    """An episode with a photograph in place of the desktop's plain background."""

    def __init__(self, episode: AgentEpisode) -> None:
        super().__init__(episode)
        self.observation = _busy(episode.observation)

    async def step(self, *actions: Any, **options: Any) -> Any:
        result = await super().step(*actions, **options)
        return replace(result, observation=_busy(result.observation))


def _busy(observation: Any) -> Any:
    import numpy as np

    started_s = time.thread_time()
    rgb_HWC = observation.tiles.rgb_HWC()
    # Each row of the background has one colour, which the last column shows.
    is_background = (rgb_HWC == rgb_HWC[:, -1:]).all(axis=2, keepdims=True)
    tiles = TiledImage.from_rgb(np.where(is_background, _photograph(), rgb_HWC))
    _measured.composing_s += time.thread_time() - started_s
    return replace(observation, tiles=tiles, image_id=tiles.image_id)


@cache
def _photograph() -> Any:
    """Return smooth colours with the noise of a camera: about 1 MB as PNG."""
    import numpy as np

    y, x = np.mgrid[: _SCREEN_PX[1], : _SCREEN_PX[0]]
    waves_HWC = np.stack([np.sin(x / 97 + y / 211), np.sin(y / 83), np.cos((x + y) / 150)], axis=-1)
    noise_HW1 = np.random.default_rng(0).normal(0, 0.8, (*y.shape, 1))
    return np.clip(128 + 80 * waves_HWC + noise_HW1, 0, 255).astype(np.uint8)


def _reply(number: int) -> str:
    """Return a reply that changes the screen: every other click presses the task's button."""
    point = (640, 125) if number % 2 else (40 + number * 31 % 900, 60 + number * 53 % 700)
    return grammar("qwen3-vl").render([Click(*point)])


class _Engine(GenerateServer):
    """Answers at once, and counts the bytes of requests, of their newest pictures, and requests."""

    def __init__(self, checkpoint: str, sent: Any, port: int) -> None:
        super().__init__(shared_port=port)
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self._sent = sent

    async def generate(self, payload: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Answer with a click."""
        images, prompt = payload["image_data"], payload["input_ids"]
        # A PNG's header; a token has 32x32 pixels.
        sizes = [struct.unpack(">II", _start(uri)[16:24]) for uri in images]
        tokens = sum(width // 32 * (height // 32) for width, height in sizes)
        ids = self._tokenizer.encode(_reply(len(images)) + "<|im_end|>", add_special_tokens=False)
        if payload["sampling_params"]["max_new_tokens"] > 1:  # one token: the plug-in checks the engine
            written = path.stat().st_size if (path := file_of(images[-1])) else 0
            sent = sum(map(len, images)) + written + 6 * len(prompt)
            with self._sent.get_lock():
                for index, count in enumerate((sent, written or len(images[-1]), 1)):
                    self._sent[index] += count
        return answer_of(
            self._tokenizer.decode(ids),
            ids,
            [-0.5] * len(ids),
            finish="stop",
            prompt_tokens=len(prompt) - len(images) + tokens,
            weight_version="1",
        )


def _start(uri: str) -> bytes:
    """Return the first bytes of a picture."""
    if (path := file_of(uri)) is None:
        return base64.b64decode(uri.partition(",")[2][:32])
    with path.open("rb") as file:
        return file.read(24)


@contextmanager
def _engine(checkpoint: Path, count: int) -> Iterator[tuple[int, Any]]:
    """Yield the port of one engine in each of `count` processes, at least one, and their counters."""
    sent, port = get_context("spawn").Array("Q", 3), 0
    with ExitStack() as running:
        for _ in range(max(1, count)):
            process = WorkerProcess(_serve, str(checkpoint), sent, port, name="engine")
            running.callback(process.stop, None, timeout_s=_STOP_S)
            port = process.pipe.recv()
        yield port, sent


def _serve(pipe: Any, checkpoint: str, sent: Any, port: int) -> None:
    with _Engine(checkpoint, sent, port) as engine:
        pipe.send(engine.ports[0])
        pipe.recv()
