"""Stage `clone`: supervised training on demonstrated replies, stopped while reinforcement still has room."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from cuaenv.cli.terminal import ProgressReport
from trainer.learn import LearnError
from trainer.learn.demos import Rows, read_rows
from trainer.learn.policy import Policy
from trainer.learn.record import MetricsLog
from trainer.learn.settings import Settings
from trainer.learn.states import RunState, cosine, load_state, make_optimizer, save_state, train_step

logger = logging.getLogger(__name__)
_LOG_EVERY = 50
_CHECK_EVERY = 100
_SAVE_EVERY = 500
_CHECK_ROWS = 512
_FRAMES_AT_ONCE = 1024


class _Batches:
    """Rows as padded tensors. All frames lie on the device, so that a step copies nothing."""

    def __init__(self, rows: Rows, policy: Policy, image_px: tuple[int, int]) -> None:
        width, height = image_px
        self._rows, self._policy = rows, policy
        # One length for all batches, so that a compiled model is compiled once.
        self._longest = int(np.diff(rows.ends, prepend=0).max())
        try:
            self._frames = torch.empty(len(rows), height, width, 3, dtype=torch.uint8, device=policy.device)
            with ThreadPoolExecutor() as threads:
                # In parts: all of them at once would be tens of gigabytes of host memory.
                for start in range(0, len(rows), _FRAMES_AT_ONCE):
                    part = b"".join(threads.map(_decompressed, rows.frames[start : start + _FRAMES_AT_ONCE]))
                    frames = torch.frombuffer(bytearray(part), dtype=torch.uint8).view(-1, height, width, 3)
                    self._frames[start : start + len(frames)] = frames.to(policy.device)
        except torch.OutOfMemoryError as error:
            raise LearnError(
                f"clone: no GPU memory for {len(rows)} frames: {error}; lower demos.seeds or use a larger GPU"
            ) from error

    def make(self, chosen: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return ids, patches, and the places and values of the tokens to predict."""
        ids = [self._rows.row(index) for index in chosen]
        table = np.full((len(ids), self._longest), self._policy.pad_id, np.int64)
        rows, columns = [], []
        for index, (row, reply_length) in enumerate(zip(ids, self._rows.reply_lengths[chosen], strict=True)):
            table[index, : len(row)] = row
            columns.append(np.arange(len(row) - reply_length, len(row)))
            rows.append(np.full(reply_length, index))
        device = self._policy.device
        table_BT = torch.from_numpy(table).to(device)
        row_N = torch.from_numpy(np.concatenate(rows)).to(device)
        column_N = torch.from_numpy(np.concatenate(columns)).to(device)
        return {
            "ids": table_BT,
            "patches": self._policy.patches(self._frames[torch.from_numpy(chosen).to(device)]),
            "rows": row_N,
            "columns": column_N,
            "targets": table_BT[row_N, column_N],
        }


def _decompressed(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def clone(
    settings: Settings,
    demos: Path,
    directory: Path,
    *,
    seed: int,
    log: MetricsLog,
    resume: bool,
    report: ProgressReport,
) -> Policy:
    """Train from random weights, or from the last saved step, and return the policy.

    Args:
        report: Receives the progress of each step: on a CPU the first line of `log` takes minutes.

    Raises:
        LearnError: There are no rows, the state belongs to other settings, or no GPU memory is left.
    """
    options = settings.clone
    policy = Policy(demos / "model", device=settings.torch_device, image_px=settings.image_px)
    torch.manual_seed(seed)
    optimizer = make_optimizer(policy.model, learning_rate=options.learning_rate)
    state = load_state(directory, settings, stage="clone", resume=resume)
    done = 0
    if state is not None:
        policy.model.load_state_dict(state.model)
        optimizer.load_state_dict(state.optimizer)
        done = state.done
    if options.is_compiled:
        policy.compile()
    report("reading demonstrations", 0.0)
    rows = read_rows(demos)
    batches = _Batches(rows, policy, settings.image_px)
    trained, checked = np.flatnonzero(~rows.is_checked), np.flatnonzero(rows.is_checked)[:_CHECK_ROWS]
    started_s, checks = time.monotonic(), {"right_replies": 0.0}
    while done < options.steps and checks["right_replies"] < options.stop_at:
        spent = (time.monotonic() - started_s) / options.seconds if options.seconds else 0.0
        if spent > 1:
            break
        report("training", done, options.steps)
        # Each step's rows depend on its number alone, so a resumed run sees the same ones.
        chosen = np.random.default_rng((seed, done)).choice(trained, min(options.batch, len(trained)), replace=False)
        along = max(done / options.steps, spent)
        rate = cosine(done, along, peak=options.learning_rate, warmup=options.warmup_steps)
        batch = batches.make(chosen)
        loss = torch.nn.functional.cross_entropy(
            policy.logits(batch["ids"], batch["patches"], (batch["rows"], batch["columns"])), batch["targets"]
        )
        norm = train_step(policy.model, optimizer, loss, learning_rate=rate, what=f"clone step {done}")
        done += 1
        is_last = done == options.steps
        if done % _CHECK_EVERY == 0 or is_last:
            checks = check(policy, batches, checked)
        if done % _LOG_EVERY == 0 or is_last:
            seconds = time.monotonic() - started_s
            log.write(
                "clone",
                done,
                {"loss": float(loss.detach()), "grad_norm": norm, "learning_rate": rate, **checks, "s": seconds},
            )
        if done % _SAVE_EVERY == 0:
            save_state(directory, RunState.of(policy.model, optimizer, settings, stage="clone", done=done))
    save_state(directory, RunState.of(policy.model, optimizer, settings, stage="clone", done=done))
    return policy


def check(policy: Policy, batches: Any, checked: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the share of replies of which the model would say every token, and the mean loss of a token."""
    right, loss, count = 0, 0.0, 0
    # For its own batch size it would be compiled again.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for start in range(0, len(checked), 64):
            chosen = checked[start : start + 64]
            batch = batches.make(chosen)
            logits = policy.logits(batch["ids"], batch["patches"], (batch["rows"], batch["columns"]))
            wrong_rows = batch["rows"][logits.argmax(-1) != batch["targets"]].unique()
            right += len(chosen) - len(wrong_rows)
            loss += float(torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum"))
            count += len(batch["targets"])
    return {"right_replies": right / len(checked), "checked_loss": loss / count}
