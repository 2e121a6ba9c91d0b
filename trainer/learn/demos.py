"""Stage `demos`: oracles of the training templates, played in the agent's own loop, become rows of token ids.

One row is one reply with everything that the model sees before it, exactly as a rollout would build it. Each row has
its frame, compressed. Held-out templates and seeds are never played. Demonstrators may have bad habits, so that a
cloned policy is one that reinforcement can improve.
"""

import asyncio
import base64
import io
import json
import logging
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from PIL import Image

from cuaenv.client import Action, AsyncEnvClient, Click, Done, PressKeys
from trainer.agent.types import Message
from trainer.data.oracles import Oracle, read_oracles
from trainer.data.record import record
from trainer.data.split import template_id
from trainer.data.transcripts import Unusable
from trainer.learn import LearnError
from trainer.learn.checkpoint import SIZES, constant_pieces, unpack_checkpoint, write_checkpoint
from trainer.learn.settings import Demos, Settings
from trainer.replay.trajectory import IMAGE_PLACEHOLDER
from trainer.tokens.chat import Chat

logger = logging.getLogger(__name__)
_LIST_TIMEOUT = timedelta(seconds=120)
#: Share of rows that measure cloning; they belong to whole variants.
_CHECKED_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Demonstrated replies."""

    ids: npt.NDArray[np.int32]
    """All rows, one after the other."""
    ends: npt.NDArray[np.int64]
    """End of each row in `ids`."""
    reply_lengths: npt.NDArray[np.int32]
    """Tokens at the end of each row that are trained."""
    frames: list[bytes]
    """The frame of each row: zstd of (height, width, 3) uint8."""
    is_checked: npt.NDArray[np.bool_]
    """Rows that are not trained but measured."""

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row: the length of all batches, so that a compiled model is compiled once."""
        return int(np.diff(self.ends, prepend=0).max())

    def row(self, index: int) -> npt.NDArray[np.int32]:
        return self.ids[self.ends[index - 1] if index else 0 : self.ends[index]]


def play(
    settings: Settings, hosts: Sequence[str], oracle_file: Path, directory: Path, *, base: Path | None = None
) -> Mapping[str, float]:
    """Play oracles and write the rows and the checkpoint to clone from to `directory`. Returns counts.

    Args:
        base: Checkpoint that the stage `base` trained; None to start from random weights.

    Raises:
        LearnError: An oracle failed, or there are no training tasks.
    """
    directory.mkdir(parents=True, exist_ok=True)
    splits = {line["task_id"]: line["split"] for line in map(json.loads, oracle_file.read_text("utf-8").splitlines())}
    by_template = {template_id(task_id): split for task_id, split in splits.items()}
    (directory / "splits.json").write_text(json.dumps(by_template), encoding="utf-8")
    chosen = [oracle for oracle in read_oracles(oracle_file) if splits[oracle.task_id] == "train"]
    if not chosen:
        raise LearnError(f"{oracle_file}: no oracle of a training template; print them with `envd tasks oracles`")
    if wanted := settings.demos.tasks:
        known = {template_id(oracle.task_id) for oracle in chosen}
        for task in set(wanted) - known:
            raise LearnError(f"demos.tasks: {task}: not a training template; choose from {', '.join(sorted(known))}")
        chosen = [oracle for oracle in chosen if template_id(oracle.task_id) in wanted]
    played = [(oracle, play) for play in range(settings.demos.repeats) for oracle in chosen]
    parts = [played[index :: len(hosts)] for index in range(len(hosts))]
    given = [
        (settings, host, part, directory / f"part-{index}")
        for index, (host, part) in enumerate(zip(hosts, parts, strict=True))
    ]
    with _processes(len(hosts)) as processes:
        failures = [failure for found in processes.map(_play_part, given) for failure in found]
        if failures:
            raise LearnError(f"demos: {len(failures)} of {len(played)} oracles failed, first: {failures[0]}")
        files = [path for *_, path in given]
        texts = [text for path in files for text in _texts(path)]
        pieces = constant_pieces(texts)
        if base is None:
            words = sorted({text for role, text in texts if role != "system"})
            write_checkpoint(directory / "model", vocabulary=words, pieces=pieces, size=SIZES[settings.size])
        else:
            unpack_checkpoint(base, directory / "model", pieces=pieces)
        tokenised = list(
            processes.map(_tokenise_part, [(path, directory / "model", settings.image_px) for path in files])
        )
    _write_rows(directory, files, tokenised)
    return {"episodes": float(len(played)), "rows": float(sum(len(lengths) for _, _, lengths, _ in tokenised))}


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that an interruption ends at once, and not after all of their work."""
    context, ignored = get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(count, mp_context=context, initializer=signal.signal, initargs=ignored) as processes:
        try:
            yield processes
        except BaseException:
            for process in active_children():
                process.terminate()
            raise


# Play


def _play_part(given: tuple[Settings, str, list[tuple[Oracle, int]], Path]) -> list[str]:
    """Play oracles on one daemon and write their rows; returns failures."""
    settings, host, oracles, path = given
    return asyncio.run(_play_all(settings, host, oracles, path))


async def _play_all(settings: Settings, host: str, oracles: list[tuple[Oracle, int]], path: Path) -> list[str]:
    failures: list[str] = []
    waiting = list(reversed(oracles))
    demos = settings.demos
    has_habits = max(demos.wrong_button, demos.stops_early, demos.escapes) > 0
    compress = zstandard.ZstdCompressor(level=3).compress
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as rows, path.with_suffix(".bin").open("wb") as frames:
        async with AsyncEnvClient(host, run="demos") as client:
            # Not the variants: each would count as a call towards a daemon's rate limit.
            tasks = {task.task_id: task for task in await client.list_tasks(timeout=_LIST_TIMEOUT)}

            async def play_next() -> None:
                while waiting:
                    oracle, play = waiting.pop()
                    if (task := tasks.get(template_id(oracle.task_id))) is None:
                        failures.append(f"{oracle.task_id}: {host} does not serve it")
                        continue
                    oracle = with_habits(oracle, demos, play)
                    try:
                        chunks = await record(
                            client,
                            task,
                            oracle,
                            settings=settings.agent,
                            screen_px=settings.screen_px,
                            patience_s=(),
                            must_succeed=not has_habits,
                        )
                    except Unusable as error:
                        failures.append(str(error))
                        continue
                    for chunk in chunks:
                        row, frame = await asyncio.to_thread(_row_of, chunk.messages, chunk.images)
                        packed = compress(frame)
                        frames.write(packed)
                        rows.write(json.dumps({"task": oracle.task_id, "messages": row, "size": len(packed)}) + "\n")

            await asyncio.gather(*(play_next() for _ in range(demos.concurrency)))
    return failures


def with_habits(oracle: Oracle, demos: Demos, play: int = 0) -> Oracle:
    """Return an oracle's steps as a demonstrator with these habits takes them, the same for each play of a task."""
    rng = random.Random(f"{oracle.task_id} {play}" if play else oracle.task_id)  # noqa: S311 - not a secret
    steps: list[tuple[Action, ...]] = []
    for step in oracle.steps:
        if not isinstance(step[0], Done) and rng.random() < demos.stops_early:
            steps.append((Done(""),))
            break
        if not isinstance(step[0], Done) and rng.random() < demos.escapes:
            steps.append((PressKeys(("ctrl", "alt", "delete")),))
            break
        steps.append(tuple(_pressed(action, is_wrong=rng.random() < demos.wrong_button) for action in step))
    return replace(oracle, steps=tuple(steps))


def _pressed(action: Action, *, is_wrong: bool) -> Action:
    # Grammars have no double click with the right button.
    if is_wrong and isinstance(action, Click) and action.button == "left" and action.count == 1:
        return replace(action, button="right")
    return action


def _row_of(messages: Sequence[Mapping[str, Any]], images: Sequence[str]) -> tuple[list[tuple[str, str]], bytes]:
    """Return a chunk's messages up to its last reply, and its only frame."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    [image] = images
    frame = Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))).convert("RGB")
    return [(str(each["role"]), str(each["content"])) for each in messages[: last + 1]], frame.tobytes()


# Tokens


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.with_suffix(".jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    for line in _lines(path):
        for role, content in line["messages"]:
            yield role, content.replace(IMAGE_PLACEHOLDER, "")


_Tokenised = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int32], list[str]]


def _tokenise_part(given: tuple[Path, Path, tuple[int, int]]) -> _Tokenised:
    """Return the ids, lengths, reply lengths and tasks of a part's rows."""
    from transformers import AutoProcessor  # noqa: PLC0415 -- seconds, and only here

    path, checkpoint, image_px = given
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
    tokenizer = processor.tokenizer
    chat, blank = Chat(tokenizer, processor), Image.new("RGB", image_px)
    ids: list[int] = []
    lengths, reply_lengths, tasks = [], [], []
    for line in _lines(path):
        *before, (_, reply) = line["messages"]
        prompt = chat.opening([Message(role, _parts(content, blank)) for role, content in before])
        answer = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        ids += [*prompt.train_ids, *answer]
        lengths.append(len(prompt.train_ids) + len(answer))
        reply_lengths.append(len(answer))
        tasks.append(line["task"])
    return np.array(ids, np.int32), np.array(lengths, np.int64), np.array(reply_lengths, np.int32), tasks


def _parts(content: str, blank: Image.Image) -> tuple[Any, ...]:
    before, found, after = content.partition(IMAGE_PLACEHOLDER)
    return tuple(part for part in (before, blank if found else "", after) if part)


# Files


def _write_rows(directory: Path, files: Sequence[Path], tokenised: Sequence[_Tokenised]) -> None:
    tasks = [task for *_, part in tokenised for task in part]
    checked = sorted(set(tasks))[:: round(1 / _CHECKED_SHARE)]
    with (directory / "frames.bin").open("wb") as frames:
        for path in files:
            frames.write(path.with_suffix(".bin").read_bytes())
    np.savez(
        directory / "rows.npz",
        ids=np.concatenate([ids for ids, *_ in tokenised]),
        ends=np.concatenate([lengths for _, lengths, *_ in tokenised]).cumsum(),
        reply_lengths=np.concatenate([lengths for _, _, lengths, _ in tokenised]),
        frame_ends=np.cumsum([line["size"] for path in files for line in _lines(path)]),
        is_checked=np.isin(tasks, checked),
    )
    for path in files:
        path.with_suffix(".bin").unlink()
        path.with_suffix(".jsonl").unlink()


def read_rows(directory: Path) -> Rows:
    """Read the rows of `play`. Raises: LearnError: There are none, or none to measure."""
    try:
        stored = np.load(directory / "rows.npz")
        data = (directory / "frames.bin").read_bytes()
    except OSError as error:
        raise LearnError(f"{directory}: no demonstrations: {error}; run the stage `demos` first") from error
    if not stored["is_checked"].any():
        raise LearnError(f"{directory}: no row is held out to measure cloning; play more seeds (demos.seeds)")
    ends = stored["frame_ends"].tolist()
    return Rows(
        ids=stored["ids"],
        ends=stored["ends"],
        reply_lengths=stored["reply_lengths"],
        frames=[data[start:end] for start, end in zip([0, *ends], ends, strict=False)],
        is_checked=stored["is_checked"],
    )
