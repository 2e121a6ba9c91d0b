"""Stage `clone`: supervised training on demonstrated replies, stopped while reinforcement still has room."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from cuaenv.cli.terminal import ProgressReport
from trainer.learn import LearnError
from trainer.learn.base import screens_loss
from trainer.learn.demos import Rows, read_rows
from trainer.learn.policy import Policy, memory_errors
from trainer.learn.record import MetricsLog
from trainer.learn.screens import RowSource
from trainer.learn.settings import Clone, Settings
from trainer.learn.states import RunState, cosine, load_state, make_optimizer, save_state, train_step

logger = logging.getLogger(__name__)
_LOG_EVERY = 50
_SAVE_EVERY = 500
_CHECK_ROWS = 512
_FRAMES_AT_ONCE = 1024


#: Returns the tensors of some rows, see `make_batch`.
MakeBatch = Callable[[npt.NDArray[np.int64]], Mapping[str, torch.Tensor]]
#: Plays the validation episodes after that many steps and returns measurements, `success_frac` among them.
Play = Callable[[int], Mapping[str, float]]


def _frames_on_device(rows: Rows, policy: Policy, image_px: tuple[int, int]) -> torch.Tensor:
    """Return the frames of all rows on the device, so that a step copies nothing. Raises: LearnError."""
    width, height = image_px
    with memory_errors("lower demos.seeds, or use a larger GPU"), ThreadPoolExecutor() as threads:
        found = torch.empty(len(rows), height, width, 3, dtype=torch.uint8, device=policy.device)
        # In parts: all of them at once would be tens of gigabytes of host memory.
        for start in range(0, len(rows), _FRAMES_AT_ONCE):
            part = b"".join(threads.map(_decompressed, rows.frames[start : start + _FRAMES_AT_ONCE]))
            frames = torch.frombuffer(bytearray(part), dtype=torch.uint8).view(-1, height, width, 3)
            found[start : start + len(frames)] = frames.to(policy.device)
    return found


def make_batch(
    rows: Rows, frames: torch.Tensor, policy: Policy, chosen: npt.NDArray[np.int64]
) -> dict[str, torch.Tensor]:
    """Return ids, patches, and the places and values of the tokens to predict, of chosen rows."""
    ids = [rows.row(index) for index in chosen]
    table = np.full((len(ids), rows.longest), policy.pad_id, np.int64)
    at_rows, at_columns = [], []
    for index, (row, reply_length) in enumerate(zip(ids, rows.reply_lengths[chosen], strict=True)):
        table[index, : len(row)] = row
        at_columns.append(np.arange(len(row) - reply_length, len(row)))
        at_rows.append(np.full(reply_length, index))
    device = policy.device
    table_BT = torch.from_numpy(table).to(device)
    row_N = torch.from_numpy(np.concatenate(at_rows)).to(device)
    column_N = torch.from_numpy(np.concatenate(at_columns)).to(device)
    return {
        "ids": table_BT,
        "patches": policy.patches(frames[torch.from_numpy(chosen).to(device)]),
        "rows": row_N,
        "columns": column_N,
        "targets": table_BT[row_N, column_N],
    }


def _decompressed(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _no_episodes(done: int) -> Mapping[str, float]:  # noqa: ARG001 -- a Play
    return {}


def clone(
    settings: Settings,
    demos: Path,
    directory: Path,
    *,
    seed: int,
    log: MetricsLog,
    resume: bool,
    report: ProgressReport,
    validation: Callable[[Policy], AbstractContextManager[Play]] = lambda _: nullcontext(_no_episodes),
) -> Policy:
    """Train from random weights, or from the last saved step, and return the policy.

    Args:
        report: Receives the progress of each step: on a CPU the first line of `log` takes minutes.
        validation: Yields a function that plays the validation episodes by the policy; by default there are none.

    Raises:
        LearnError: There are no rows, the state belongs to other settings, no GPU memory is left, or the policy ended
            outside of `clone.sampled_success`; it is saved then.
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
    batch_of = partial(make_batch, rows, _frames_on_device(rows, policy, settings.image_px), policy)
    trained, checked = np.flatnonzero(~rows.is_checked), np.flatnonzero(rows.is_checked)[:_CHECK_ROWS]
    started_s, checks, is_measured = time.monotonic(), dict[str, float](), False

    def measure() -> dict[str, float]:
        # For its own batch size the model would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            return {**check(policy, batch_of, checked), **play(done)}

    with ExitStack() as running:
        play = running.enter_context(validation(policy))
        screens = None
        if options.keeps_reading:
            # Other screens than those of the base, whose last five digits are lower.
            first_seed = (seed * 1000 + done) * 100_000 + 99_000
            screens = running.enter_context(RowSource(settings, demos / "model", policy.device, seed=first_seed))
        while done < options.steps and not (is_measured and is_enough(options, checks)):
            spent = (time.monotonic() - started_s) / options.seconds if options.seconds else 0.0
            if spent > 1:
                break
            report("training", done, options.steps)
            # Each step's rows depend on its number alone, so a resumed run sees the same ones.
            generator = np.random.default_rng((seed, done))
            batch = batch_of(generator.choice(trained, min(options.batch, len(trained)), replace=False))
            rate = cosine(
                done, max(done / options.steps, spent), peak=options.learning_rate, warmup=options.warmup_steps
            )
            logits = policy.logits(batch["ids"], batch["patches"], (batch["rows"], batch["columns"]))
            loss = reply_loss(logits, batch["targets"], smoothing=options.label_smoothing)
            losses = {"loss": loss}
            if screens is not None:
                losses["screens_loss"] = screens_loss(policy, screens.batch())[0]
            total = torch.stack([*losses.values()]).sum()
            norm = train_step(policy.model, optimizer, total, learning_rate=rate, what=f"clone step {done}")
            done += 1
            if is_measured := is_due(options, done):
                checks = measure()
            if is_measured or done % _LOG_EVERY == 0:
                shown = {name: float(each.detach()) for name, each in losses.items()}
                shown |= {"grad_norm": norm, "learning_rate": rate}
                log.write("clone", done, {**shown, **checks, "s": time.monotonic() - started_s})
            if done % _SAVE_EVERY == 0:
                save_state(directory, RunState.of(policy.model, optimizer, settings, stage="clone", done=done))
        save_state(directory, RunState.of(policy.model, optimizer, settings, stage="clone", done=done))
        if options.sampled_success is not None:
            require_success(options, checks if is_measured else measure(), done=done)
    return policy


def reply_loss(logits: torch.Tensor, targets: torch.Tensor, *, smoothing: float) -> torch.Tensor:
    """Return the mean cross entropy of tokens, with a share of each target spread over all tokens that can be said."""
    loss = torch.nn.functional.cross_entropy(logits, targets)
    if not smoothing:
        return loss
    # torch's own smoothing includes suppressed tokens, whose loss is infinite.
    table = torch.log_softmax(logits, dim=-1)
    can_be_said = ~table.isinf()
    spread = -torch.where(can_be_said, table, 0.0).sum(-1) / can_be_said.sum(-1)
    return (1 - smoothing) * loss + smoothing * spread.mean()


def is_due(options: Clone, done: int) -> bool:
    """Return whether a policy is measured after so many steps: not in the warm-up, which no measurement may end."""
    return done == options.steps or (done >= options.warmup_steps and done % options.check_every == 0)


def is_enough(options: Clone, checks: Mapping[str, float]) -> bool:
    """Return whether a policy with these measurements is cloned no further."""
    is_good = options.sampled_success is not None and sampled_success(checks) >= options.sampled_success[0]
    return is_good or checks["right_replies"] >= options.stop_at or checks["entropy"] < options.min_entropy


def sampled_success(checks: Mapping[str, float]) -> float:
    """Return how often sampled replies succeed: in validation episodes, or without any, in rows."""
    return checks.get("success_frac", checks["sampled_right_replies"])


def require_success(options: Clone, checks: Mapping[str, float], *, done: int) -> None:
    """Require that a policy can be reinforced. Raises: LearnError: It succeeds too rarely or too often."""
    assert options.sampled_success is not None  # noqa: S101  (asked for)
    (low, high), found = options.sampled_success, sampled_success(checks)
    if low <= found <= high:
        return
    remedy = (
        "clone for longer, or play more demonstrations, or lower clone.min_entropy"
        if found < low
        else "start again, and measure more often (clone.check_every), or after a shorter warm-up (clone.warmup_steps)"
    )
    raise LearnError(
        f"clone: sampled success is {found:.2f} after {done} steps, with an entropy of {checks['entropy']:.2f}, outside"
        f" of clone.sampled_success ({low} to {high}); {remedy}"
    )


def check(policy: Policy, batch_of: MakeBatch, checked: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return measurements on rows.

    They are the share of replies of which the model would say every token, the mean chance that it samples exactly the
    reply, and the mean entropy and loss of a reply's token.
    """
    right, chances, loss, entropy, count = 0, 0.0, 0.0, 0.0, 0
    with torch.no_grad():
        for start in range(0, len(checked), 64):
            chosen = checked[start : start + 64]
            batch = batch_of(chosen)
            logits = policy.logits(batch["ids"], batch["patches"], (batch["rows"], batch["columns"]))
            table = torch.log_softmax(logits, dim=-1)
            log_probs = table.gather(1, batch["targets"][:, None])[:, 0]
            wrong_rows = batch["rows"][logits.argmax(-1) != batch["targets"]].unique()
            right += len(chosen) - len(wrong_rows)
            by_row = torch.zeros(len(chosen), device=log_probs.device).index_add_(0, batch["rows"], log_probs)
            chances += float(by_row.exp().sum())
            loss -= float(log_probs.sum())
            entropy -= float((table.exp() * table.clamp_min(-100)).sum())
            count += len(batch["targets"])
    return {
        "right_replies": right / len(checked),
        "sampled_right_replies": chances / len(checked),
        "entropy": entropy / count,
        "checked_loss": loss / count,
    }
