"""Stage `base`: supervised pre-training on labelled screens, after which a policy can read and point.

```text
process   envd.drawn.screens ──► pictures, questions ──► rows of tokens
this one  rows ──► training; probes of words and fonts that are never trained
```

A row is one screen with several questions: each question with its answer is a branch that attends to the screen and to
itself alone, so it is trained exactly as a row of its own, and the picture is encoded once. A question about a later
part of a sentence has a row of its own: the sentence, the replies to the parts before, and the picture, as an agent
sees them after its first reply. Answers are replies of the policy's own grammar: a left click, a drag, text that is
typed, or that all is done.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from PIL import Image

from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action, Click, Done, Drag, PressKeys, TypeText
from trainer.agent.coordinates import CoordinateSpace, points_of, to_model_points, to_screen_points
from trainer.agent.prompts import (
    DROPPED,
    RESULT_OK,
    ModelObservation,
    dropped_task_message,
    observation_message,
    system_message,
    task_message,
)
from trainer.agent.types import Message
from trainer.evaluate.statistics import wilson
from trainer.files import write_atomically
from trainer.learn import LearnError
from trainer.learn.checkpoint import (
    SIZES,
    constant_pieces,
    pack_checkpoint,
    read_packed,
    unpack_checkpoint,
    write_checkpoint,
)
from trainer.learn.policy import Policy
from trainer.learn.record import MetricsLog
from trainer.learn.sampler import ReplySampler, SamplerRequest
from trainer.learn.settings import Settings
from trainer.learn.states import (
    ProcessLost,
    RunState,
    cosine,
    load_state,
    make_optimizer,
    save_state,
    sum_over_group,
    train_step,
)
from trainer.tokens.chat import Chat
from trainer.workers import WorkerProcess

logger = logging.getLogger(__name__)
_LOG_EVERY_S = 5.0
_START_S = 300.0
#: Screens that a process sends at once.
_SCREENS_AT_ONCE = 4
_PROBE_SLOTS = 256
_PROBE_SEED = 1_000_000
#: Sets of probes: words and fonts that are never trained; and the look of the suite's tasks.
_PROBES = {"unseen": ("--unseen",), "plain": ("--plain",)}
#: Texts that many questions have in common; each is one token.
_PHRASES = (
    "system\n", "user\n", "assistant\n", "Task: Point at ", "Task: Point at the ", "Task: Read ", "Task: Read the ",
    "Task: Point at what is ", "Task: Read what is ", "left of ", "right of ", "above ", "below ", " ticked?",
    "Task: Point at the close button of ", "Task: Read the text at ", "Task: Is ", "Task: Is the box at ",
    "first ", "second ", "third ", "fourth ", "fifth ", "button", "label", "field", "title", "option", "Task: ",
)  # fmt: skip

Screen = tuple[list[dict[str, Any]], bytes]


#: Types of the columns of `packed`, in the order in which a process sends them.
_COLUMNS = {
    "ids": torch.int32,
    "branch": torch.int32,
    "place": torch.int32,
    "is_trained": torch.bool,
    "frames": torch.uint8,
}


class Questions:
    """Questions as tokens."""

    def __init__(self, settings: Settings, tokenizer: Any, processor: Any) -> None:
        """Use the tokenizer and the processor of the policy's checkpoint."""
        agent = settings.agent
        self._agent, self._tokenizer, self._grammar = agent, tokenizer, agent.make_grammar()
        self._space = CoordinateSpace.of(agent.units, image_px=settings.image_px, screen_px=settings.screen_px)
        self._chat = Chat(tokenizer, processor)
        self._blank = Image.new("RGB", settings.image_px)
        self._end_id = int(tokenizer.eos_token_id)
        example = self.whole_prompt("-")
        self.beginning = example[: _after_last(example, tokenizer.convert_tokens_to_ids("<|vision_end|>"))]
        """Ids of a row up to its picture, which all questions share."""
        # Between the picture and the reply.
        rendered = self._chat.decode(example[len(self.beginning) :])
        self._before, _, self._after = rendered.partition(agent.make_prompt().task("-"))

    def whole_prompt(self, text: str, earlier: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of a row with a question, up to its reply, as a rollout would make them."""
        observed = ModelObservation(image=self._blank, image_id="", tree=None, terminal=None, boxes_px=())
        messages = [system_message(self._agent, self._space.picture())]
        if not earlier:
            messages.append(task_message(text, observed, self._agent))
        for number, answer in enumerate(earlier):
            seen = Message("user", (f"{RESULT_OK} {DROPPED}",)) if number else dropped_task_message(text, self._agent)
            messages += [seen, Message("assistant", (self.reply_of(answer),))]
        if earlier:
            messages.append(observation_message(RESULT_OK, observed))
        return list(self._chat.opening(messages).train_ids)

    def text_of(self, question: Mapping[str, Any]) -> str:
        """Return a question with its point in the policy's units."""
        text = str(question["text"])
        if "at" in question:
            x, y = self._space.from_screen(*question["at"])
            text = text.replace("{at}", f"[{x}, {y}]")
        return text

    def reply_of(self, question: Mapping[str, Any]) -> str:
        """Return the right reply."""
        if "reply" in question:
            return self._grammar.write([TypeText(str(question["reply"]))])
        if "point" not in question:
            return self._grammar.write([Done("")])
        act = Drag(*question["point"], *question["to"]) if "to" in question else Click(*question["point"])
        return self._grammar.write([to_model_points(act, self._space)])

    def prompt(self, question: Mapping[str, Any]) -> list[int]:
        """Return the ids of a row with this question, up to its reply."""
        if "earlier" in question:
            return self.whole_prompt(self.text_of(question), question["earlier"])
        return [*self.beginning, *self.prompts([question])[0]]

    def row(self, question: Mapping[str, Any]) -> tuple[list[int], int]:
        """Return the ids of a row with this question and its reply, and how many of them are the reply."""
        [reply] = self._encoded([self.reply_of(question)])
        return [*self.prompt(question), *reply, self._end_id], len(reply) + 1

    def prompts(self, questions: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return the ids of each question, from the picture up to the reply."""
        task = self._agent.make_prompt().task
        return self._encoded([f"{self._before}{task(self.text_of(each))}{self._after}" for each in questions])

    def branches(self, questions: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], int]]:
        """Return the ids of each question with its reply, and how many of them are the reply."""
        replies = self._encoded([self.reply_of(each) for each in questions])
        prompts = self.prompts(questions)
        return [
            ([*prompt, *reply, self._end_id], len(reply) + 1) for prompt, reply in zip(prompts, replies, strict=True)
        ]

    def is_right(self, question: Mapping[str, Any], reply_ids: Sequence[int]) -> bool:
        """Return whether a reply is complete, and points into the box or says the text."""
        if not reply_ids or reply_ids[-1] != self._end_id:
            return False
        text = self._tokenizer.decode(reply_ids[:-1], skip_special_tokens=False)
        match self._grammar.parse(text, self._space.picture()).actions:
            case (Click(button="left", count=1) | Drag() as act,) if isinstance(act, Drag) == ("to" in question):
                return "box" in question and self._is_at(act, question)
            case (TypeText(text=said),):
                return said == question.get("reply")
            case (Done(),):
                return "reply" not in question and "box" not in question
        return False

    def _is_at(self, act: Action, question: Mapping[str, Any]) -> bool:
        try:
            points = points_of(to_screen_points(act, self._space))
        except ParseError:
            return False
        boxes = [question[name] for name in ("box", "to_box") if name in question]
        return len(points) == len(boxes) and all(
            x <= at_x < x + w and y <= at_y < y + h for (at_x, at_y), (x, y, w, h) in zip(points, boxes, strict=True)
        )

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []


def _after_last(ids: Sequence[int], wanted: int) -> int:
    return len(ids) - list(reversed(ids)).index(wanted)


def packed(
    questions: Questions, screens: Sequence[Screen], settings: Settings, *, pad_id: int
) -> dict[str, torch.Tensor]:
    """Return screens as rows of tokens of one length, each with as many of its questions as fit.

    `ids` has the tokens; `branch` is 0 for the beginning of a row, and the number of its question for each other token;
    `place` is where each token would be if its question were the only one; `is_trained` marks replies; and `frames` has
    the pictures (screens, height, width, 3).
    """
    length, beginning = settings.base.row_tokens, questions.beginning
    ids = np.full((len(screens), length), pad_id, np.int32)
    branch, place = np.full((len(screens), length), -1, np.int32), np.zeros((len(screens), length), np.int32)
    is_trained = np.zeros((len(screens), length), np.bool_)
    width, height = settings.image_px
    frames = np.empty((len(screens), height, width, 3), np.uint8)
    for row, (asked, frame) in enumerate(screens):
        frames[row] = _scaled(frame, settings)
        end = len(beginning)
        ids[row, :end], branch[row, :end], place[row, :end] = beginning, 0, np.arange(end)
        for question in (each for each in asked if "earlier" in each):
            tokens, reply_length = questions.row(question)
            end = len(tokens)
            if end <= length:
                ids[row, :end], branch[row, :end], place[row, :end] = tokens, 0, np.arange(end)
                is_trained[row, end - reply_length : end] = True
        after_picture = [each for each in asked if "earlier" not in each]
        for number, (tokens, reply_length) in enumerate(questions.branches(after_picture), start=1):
            start, end = end, end + len(tokens)
            if end > length:
                break
            ids[row, start:end], branch[row, start:end] = tokens, number
            place[row, start:end] = len(beginning) + np.arange(len(tokens))
            is_trained[row, end - reply_length : end] = True
    parts = {"ids": ids, "branch": branch, "place": place, "is_trained": is_trained, "frames": frames}
    return {name: torch.from_numpy(part) for name, part in parts.items()}


def _scaled(frame: bytes, settings: Settings) -> npt.NDArray[np.uint8]:
    width, height = settings.screen_px
    if settings.image_px == settings.screen_px:
        return np.frombuffer(frame, np.uint8).reshape(height, width, 3)
    picture = Image.frombytes("RGB", settings.screen_px, frame)
    return np.asarray(picture.resize(settings.image_px, Image.Resampling.BICUBIC))


# Screens


def read_screens(settings: Settings, seed: int, *options: str) -> Iterator[Screen]:
    """Yield questions and pixels of new screens, without end; equal seeds give equal screens.

    Raises:
        LearnError: The program that draws them ended.
    """
    width, height = settings.screen_px
    command = [sys.executable, "-P", "-m", "envd.drawn.screens", "--seed", str(seed), *options]
    command += ["--width", str(width), "--height", str(height)]
    for folder in settings.base.fonts:
        command += ["--fonts", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None  # noqa: S101  (a pipe)
        try:
            while line := process.stdout.readline():
                pixels = process.stdout.read(width * height * 3)
                yield json.loads(line)["questions"], pixels
            raise LearnError("envd.drawn.screens: it ended, see above; install envd here")
        finally:
            process.kill()


def _send_rows(pipe: Connection, settings: Settings, checkpoint: Path, seed: int) -> None:
    """Send rows as bytes until the reader is gone; a process of its own."""
    torch.set_num_threads(1)
    tokenizer, processor = _read_tokenizer(checkpoint)
    questions = Questions(settings, tokenizer, processor)
    source = read_screens(settings, seed)
    with suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            screens = [next(source) for _ in range(_SCREENS_AT_ONCE)]
            rows = packed(questions, screens, settings, pad_id=int(tokenizer.pad_token_id))
            pipe.send_bytes(b"".join(rows[name].numpy().tobytes() for name in _COLUMNS))


def _read_tokenizer(checkpoint: Path) -> tuple[Any, Any]:
    from transformers import AutoProcessor  # noqa: PLC0415 -- seconds

    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
    return processor.tokenizer, processor


class RowSource:
    """Batches from processes that draw. Use as a context manager."""

    def __init__(self, settings: Settings, checkpoint: Path, device: torch.device, *, seed: int) -> None:
        """Start the processes."""
        count = settings.base.processes or max(1, len(os.sched_getaffinity(0)) // 2 // _world())
        self._settings, self._device = settings, device
        self._processes = [
            WorkerProcess(_send_rows, settings, checkpoint, seed + index, name=f"screens-{index}")
            for index in range(count)
        ]
        self._batches: queue.Queue[dict[str, torch.Tensor] | Exception] = queue.Queue(maxsize=3)
        self._is_closed = False
        self.pause = threading.Lock()
        """Held to keep the device to oneself: a CUDA graph cannot be captured while another thread copies."""
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def __enter__(self) -> "RowSource":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        for process in self._processes:
            process.kill()
        with suppress(queue.Empty):
            while True:
                self._batches.get_nowait()
        self._thread.join(_LOG_EVERY_S)

    def batch(self) -> dict[str, torch.Tensor]:
        """Return the next batch, the columns of `packed`, on the device.

        Raises:
            LearnError: A process ended, or sends nothing.
        """
        try:
            found = self._batches.get(timeout=_START_S)
        except queue.Empty:
            raise LearnError(f"screens: none came for {_START_S:.0f} s; see the messages above") from None
        if isinstance(found, Exception):
            raise LearnError(f"screens: a process that draws ended ({found}); see above, then --resume") from found
        return found

    def _collect(self) -> None:
        pipes = {process.pipe: process for process in self._processes}
        parts: list[dict[str, torch.Tensor]] = []
        copying = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        try:
            while not self._is_closed:
                for pipe in wait([*pipes], timeout=1.0):
                    parts.append(self._rows_of(bytearray(pipe.recv_bytes())))  # type: ignore[union-attr]
                    if len(parts) * _SCREENS_AT_ONCE >= self._settings.base.screens:
                        with self.pause, torch.cuda.stream(copying):
                            batch = self._joined(parts)
                            if copying is not None:
                                copying.synchronize()
                        parts = []
                        self._batches.put(batch)
        except (EOFError, OSError, RuntimeError) as error:
            if not self._is_closed:
                self._batches.put(error)

    def _rows_of(self, data: bytearray) -> dict[str, torch.Tensor]:
        width, height = self._settings.image_px
        count, length = _SCREENS_AT_ONCE, self._settings.base.row_tokens
        found, start = {}, 0
        for name, kind in _COLUMNS.items():
            shape = (count, height, width, 3) if name == "frames" else (count, length)
            size = int(np.prod(shape)) * kind.itemsize
            found[name] = torch.frombuffer(data, dtype=kind, count=int(np.prod(shape)), offset=start).view(shape)
            start += size
        return found

    def _joined(self, parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        count = self._settings.base.screens
        joined = {name: torch.cat([part[name] for part in parts])[:count] for name in _COLUMNS}
        if self._device.type == "cuda":
            joined = {name: each.pin_memory().to(self._device, non_blocking=True) for name, each in joined.items()}
        return joined


# Training


def _world() -> int:
    """Return the number of training processes that torchrun started, each for a GPU of its own; 1 without it."""
    # Other launchers set WORLD_SIZE too.
    return int(os.environ["WORLD_SIZE"]) if torch.distributed.is_torchelastic_launched() else 1


@contextmanager
def _process_group(device: str) -> Iterator[tuple[str, int]]:
    """Yield this process's device, and its rank among those that torchrun started, which take each step together."""
    if _world() == 1:
        yield device, 0
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    with ExitStack() as running:
        running.callback(torch.distributed.destroy_process_group)
        if rank := torch.distributed.get_rank():
            # Rank 0 saves when it is interrupted: it must not wait in a step for a process that has left.
            _ignore_interruptions(running)
        yield device, rank


def _ignore_interruptions(running: ExitStack) -> None:
    """Ignore SIGINT and SIGTERM until `running` ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        running.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))


def _agreed(seconds: float, count: int, device: torch.device) -> tuple[float, int]:
    """Return the seconds of the process of rank 0, and the sum of all processes' counts."""
    if not torch.distributed.is_initialized():
        return seconds, count
    own_s = seconds if torch.distributed.get_rank() == 0 else 0.0
    both = torch.tensor([own_s, count], dtype=torch.float64, device=device)
    sum_over_group(both)
    return float(both[0]), int(both[1])


def train(settings: Settings, directory: Path, *, start: Path | None, seed: int, log: MetricsLog, resume: bool) -> None:
    """Train from the last saved step, or `start`, or else random weights; write the weights to `directory/model`.

    `directory/probes.json` has the results of the probes. An interruption (SIGINT, SIGTERM) saves the state. Of several
    processes of torchrun, that of rank 0 logs, probes and saves, also when another one ends.

    Raises:
        ProcessLost: Another process of torchrun ended.
        LearnError: The state belongs to other settings, or screens cannot be drawn.
    """
    options = settings.base
    torch.manual_seed(seed)
    untrained = directory / "untrained"
    with ExitStack() as running:
        device, rank = running.enter_context(_process_group(settings.torch_device))
        state = load_state(directory, settings, stage="base", resume=resume)
        if rank == 0 and (state is None or not untrained.exists()):
            if start is None:
                write_untrained(settings, untrained, seed=seed)
            else:
                unpack_checkpoint(start, untrained)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        policy = Policy(untrained, device=device, image_px=settings.image_px)
        optimizer = make_optimizer(policy.model, learning_rate=options.learning_rate)
        done, before_s, samples = 0, 0.0, 0
        if state is not None:
            policy.model.load_state_dict(state.model)
            optimizer.load_state_dict(state.optimizer)
            done, before_s, samples = state.done, float(state.more["seconds"]), int(state.more["samples"])
        if options.is_compiled:
            policy.compile()
        questions = Questions(settings, policy.tokenizer, policy.processor)
        # Other screens than before an interruption, and than another process's.
        first_seed = ((seed * 1000 + done) * 100 + rank) * 1000
        source = running.enter_context(RowSource(settings, untrained, policy.device, seed=first_seed))
        threads = running.enter_context(ThreadPoolExecutor())
        probes = {name: threads.submit(_probe_set, settings, 0, *words) for name, words in _PROBES.items() if rank == 0}
        started_s = time.monotonic()
        last = dict.fromkeys(("log", "probe", "save"), started_s)
        logged, trained_s = (done, samples, started_s), before_s

        def seconds() -> float:
            return before_s + time.monotonic() - started_s

        def save() -> None:
            if rank == 0:
                more = {"seconds": seconds(), "samples": samples}
                save_state(directory, RunState.of(policy.model, optimizer, settings, stage="base", done=done, **more))
                pack_checkpoint(untrained, policy.model.state_dict(), directory / "model")

        def probe(limit: int) -> dict[str, float]:
            sets = {name: screens.result() for name, screens in probes.items()}
            with source.pause:
                results = {name: probed(policy, questions, settings, each, limit) for name, each in sets.items()}
            return _written(directory, {"step": done, "samples": samples, "train_s": seconds()}, results)

        try:
            while done < options.steps and (not options.seconds or trained_s < options.seconds):
                waited_s = time.monotonic()
                batch = source.batch()
                waited_s = time.monotonic() - waited_s
                along = max(done / options.steps, trained_s / options.seconds if options.seconds else 0.0)
                rate = cosine(done, along, peak=options.learning_rate, warmup=options.warmup_steps)
                loss, count = screens_loss(policy, batch)
                norm = train_step(policy.model, optimizer, loss, learning_rate=rate, what=f"base step {done}")
                trained_s, count = _agreed(seconds(), count, policy.device)
                done, samples = done + 1, samples + count
                now_s = time.monotonic()
                if rank:
                    continue
                if now_s - last["log"] > _LOG_EVERY_S or done == options.steps:
                    speed = (samples - logged[1]) / (now_s - logged[2])
                    values = {"loss": float(loss.detach()), "grad_norm": norm, "learning_rate": rate}
                    values |= {"samples": samples, "samples_per_s": speed, "wait_s": waited_s, "s": seconds()}
                    log.write("base", done, values)
                    last["log"], logged = now_s, (done, samples, now_s)
                if now_s - last["probe"] > options.probe_every_s:
                    log.write("probe", done, probe(max(1, options.probe_questions // 4)))
                    last["probe"] = time.monotonic()
                if now_s - last["save"] > options.save_every_s:
                    save()
                    last["save"] = time.monotonic()
        except (KeyboardInterrupt, ProcessLost):
            # `timeout` sends its signal twice.
            _ignore_interruptions(running)
            save()
            raise
        save()
        if rank == 0:
            # The weights that are kept have 8 bits.
            policy.model.load_state_dict(read_packed(directory / "model"))
            log.write("probe", done, probe(options.probe_questions))


def write_untrained(settings: Settings, directory: Path, *, seed: int) -> None:
    """Write random weights, with a tokenizer of single letters: a word that was never seen is spelt like any other."""
    grammar, agent = settings.agent.make_grammar(), settings.agent
    space = CoordinateSpace.of(agent.units, image_px=settings.image_px, screen_px=settings.screen_px)
    acts: list[Action] = [
        Click(100, 100), Click(100, 100, button="right"), Click(100, 100, count=2), TypeText("-"), Done(""),
        Drag(100, 100, 200, 200), PressKeys(("ctrl", "alt", "delete")),
    ]  # fmt: skip
    texts = [("assistant", grammar.write([to_model_points(act, space)])) for act in acts]
    texts.append(("system", str(system_message(agent, space.picture()).parts[0])))
    pieces = [*constant_pieces(texts), *_PHRASES]
    write_checkpoint(directory, pieces=pieces, size=SIZES[settings.size], seed=seed)


def screens_loss(policy: Policy, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the mean loss of the replies' tokens, and the number of replies."""
    if policy.device.type == "cuda":
        for column in batch.values():
            column.record_stream(torch.cuda.current_stream())
    ids = batch["ids"].long()
    rows, columns = batch["is_trained"].nonzero(as_tuple=True)
    logits = policy.logits(
        ids, policy.patches(batch["frames"]), (rows, columns), branch_BT=batch["branch"], place_BT=batch["place"].long()
    )
    targets = ids[rows, columns]
    count = int((targets == policy.end_id).sum())
    return torch.nn.functional.cross_entropy(logits, targets), count


# Probes


def probe_checkpoint(settings: Settings, packed: Path, directory: Path, *, seed: int, log: MetricsLog) -> None:
    """Probe kept weights without training, on the screens of a seed; write `directory/probes.json`.

    Raises:
        LearnError: The weights cannot be read, or screens cannot be drawn.
    """
    policy = Policy(
        unpack_checkpoint(packed, directory / "unpacked"), device=settings.torch_device, image_px=settings.image_px
    )
    questions = Questions(settings, policy.tokenizer, policy.processor)
    results = {
        name: probed(policy, questions, settings, _probe_set(settings, seed, *words), settings.base.probe_questions)
        for name, words in _PROBES.items()
    }
    log.write("probe", 0, _written(directory, {"checkpoint": str(packed), "seed": seed}, results))


def _written(
    directory: Path, facts: Mapping[str, Any], results: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> dict[str, float]:
    """Write the results of all probes, and return their rates."""
    write_atomically(directory / "probes.json", (json.dumps({**facts, **results}, indent=1) + "\n").encode())
    return {f"{name}/{kind}": found["rate"] for name, each in results.items() for kind, found in each.items()}


def _probe_set(settings: Settings, seed: int, *options: str) -> list[Screen]:
    """Return screens that are never trained, with all their questions."""
    source = read_screens(settings, _PROBE_SEED + seed, "--questions", "0", *options)
    screens = [next(source) for _ in range(settings.base.probe_screens)]
    source.close()  # type: ignore[attr-defined]
    return screens


def probed(
    policy: Policy, questions: Questions, settings: Settings, screens: Sequence[Screen], limit: int
) -> dict[str, dict[str, float]]:
    """Return, by the kind of question, how many greedy replies are right: `right` of `count`, the rate, its interval.

    Args:
        limit: Most questions of each kind.
    """
    asked: dict[SamplerRequest, Mapping[str, Any]] = {}
    counts: dict[str, int] = defaultdict(int)
    for number, (given, frame) in enumerate(screens):
        chosen = []
        for question in given:
            if counts[question["kind"]] < limit:
                counts[question["kind"]] += 1
                chosen.append(question)
        picture = torch.from_numpy(_scaled(frame, settings).copy())
        for question in chosen:
            request = SamplerRequest(
                ids=questions.prompt(question),
                frame_HW3=picture,
                limit=settings.reply_tokens,
                temperature=0.0,
                picture=number,
            )
            asked[request] = question
    _answer(policy, [*asked])
    right: dict[str, int] = defaultdict(int)
    for request, asked_question in asked.items():
        right[asked_question["kind"]] += questions.is_right(asked_question, request.reply_ids)
    found = {}
    for kind, count in sorted(counts.items()):
        interval = wilson(right[kind], count)
        found[kind] = {"right": right[kind], "count": count, "rate": interval.mean}
        found[kind] |= {"low": interval.low, "high": interval.high}
    return found


def _answer(policy: Policy, requests: list[SamplerRequest]) -> None:
    """Reply to all requests."""
    policy.model.eval()
    generator = torch.Generator(device=policy.device).manual_seed(0)
    slots = min(_PROBE_SLOTS, len(requests))
    sampler = ReplySampler(policy, generator=generator, slot_count=slots)
    waiting = requests[::-1]
    with torch.compiler.set_stance("force_eager"):
        while waiting or sampler.running_count:
            # Many at once: reading one prompt costs a step of all.
            if waiting and sampler.free_count >= min(slots // 2 or 1, len(waiting)):
                taken = [waiting.pop() for _ in range(min(sampler.free_count, len(waiting)))]
                sampler.add(taken)
            sampler.step()
    policy.model.train()
