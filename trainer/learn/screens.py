"""Labelled screens as rows of tokens, for the stage `base` and for cloning that keeps reading.

```text
process   envd.drawn.screens ──► pictures, questions ──► rows of tokens
```

A row is one screen with several questions: each question with its answer is a branch that attends to the screen and to
itself alone, so it is trained exactly as a row of its own, and the picture is encoded once. A question about a later
part of a sentence has a row of its own: the sentence, the replies to the parts before, and the picture, as an agent
sees them after its first reply. Answers are replies of the policy's own grammar: a left click, a drag, text that is
typed, or that all is done.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from PIL import Image

from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action, Click, Done, Drag, TypeText
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
from trainer.learn import LearnError
from trainer.learn.settings import Settings
from trainer.tokens.chat import Chat
from trainer.workers import WorkerProcess

#: How long the first rows may take, and how long the end of a reader.
_START_S, _END_S = 300.0, 5.0
#: Screens that a process sends at once.
_SCREENS_AT_ONCE = 4

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

    `ids` has the tokens; `branch` is 0 for the beginning of a row, and the number of its question for each other token
    (0 for all tokens of a row with a question about a later part, which is left out if it does not fit);
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
        frames[row] = scaled(frame, settings)
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


def scaled(frame: bytes, settings: Settings) -> npt.NDArray[np.uint8]:
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
            raise LearnError("envd.drawn.screens: it ended; see above")
        finally:
            process.kill()


def _send_rows(pipe: Connection, settings: Settings, checkpoint: Path, seed: int) -> None:
    """Send rows as bytes until the reader is gone; a process of its own."""
    torch.set_num_threads(1)
    tokenizer, processor = read_tokenizer(checkpoint)
    questions = Questions(settings, tokenizer, processor)
    recorded = [word for folder in settings.base.recorded for word in ("--recorded", str(folder.expanduser()))]
    source = read_screens(settings, seed, *recorded)
    with suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            screens = [next(source) for _ in range(_SCREENS_AT_ONCE)]
            rows = packed(questions, screens, settings, pad_id=int(tokenizer.pad_token_id))
            pipe.send_bytes(b"".join(rows[name].numpy().tobytes() for name in _COLUMNS))


def read_tokenizer(checkpoint: Path) -> tuple[Any, Any]:
    from transformers import AutoProcessor  # noqa: PLC0415 -- seconds

    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
    return processor.tokenizer, processor


class RowSource:
    """Batches from processes that draw. Use as a context manager."""

    def __init__(self, settings: Settings, checkpoint: Path, device: torch.device, *, seed: int) -> None:
        """Start the processes."""
        count = settings.base.processes or max(1, len(os.sched_getaffinity(0)) // 2 // world_size())
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
        self._thread.join(_END_S)

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
            why = str(found) or type(found).__name__
            raise LearnError(f"screens: a process that draws ended ({why}); see above, then --resume") from found
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


def world_size() -> int:
    """Return the number of training processes that torchrun started, each for a GPU of its own; 1 without it."""
    # Other launchers set WORLD_SIZE too.
    return int(os.environ["WORLD_SIZE"]) if torch.distributed.is_torchelastic_launched() else 1
