"""Optimiser steps and saved states of training."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed

from trainer.learn import LearnError
from trainer.learn.settings import Settings, fingerprint

_FILE = "state.pt"
_MAX_GRAD_NORM = 1.0
_LOWEST_RATE_SHARE = 0.1
#: Settings that a state of release 0.2.0 has in addition, with the values that change nothing.
_FORMER = {"group_start": "forked", "fault_share": 0.0, "faults_as_zero": False, "escapes_as_void": False}


class ProcessLost(LearnError):
    """Another process of the group ended: it failed, was killed, or was interrupted."""


def make_optimizer(model: Any, *, learning_rate: float) -> torch.optim.AdamW:
    """Return AdamW; biases, norms and embeddings do not decay."""
    matrices = [p for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def cosine(step: int, along: float, *, peak: float, warmup: int) -> float:
    """Return the learning rate of a step: a linear rise, and half a cosine down to a tenth as `along` goes to 1."""
    shape = _LOWEST_RATE_SHARE + (1 - _LOWEST_RATE_SHARE) * (1 + math.cos(math.pi * min(1.0, along))) / 2
    return peak * shape * min(1.0, (step + 1) / warmup)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor | None, *, learning_rate: float, what: str
) -> float:
    """Make one optimiser step and return the norm of the gradient, which is the mean of all processes of a group.

    Raises:
        LearnError: Loss or gradient is not finite; the weights are unchanged.
        ProcessLost: Another process of the group ended; the weights are unchanged.
    """
    if loss is not None:
        loss.backward()
    if torch.distributed.is_initialized():
        _average([each.grad for each in model.parameters() if each.grad is not None])
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM))
    if not math.isfinite(norm):
        raise LearnError(f"{what}: the gradient is not finite; resume from the last checkpoint with a lower rate")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _average(gradients: list[torch.Tensor]) -> None:
    """Replace gradients by the mean of all processes, sent as one."""
    flat = torch.cat([each.flatten() for each in gradients])
    sum_over_group(flat)
    flat /= torch.distributed.get_world_size()
    for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def sum_over_group(values: torch.Tensor) -> None:
    """Replace a tensor by the sum of those of all processes. Raises: ProcessLost: Another process ended."""
    try:
        torch.distributed.all_reduce(values)
    except RuntimeError as error:
        raise ProcessLost("another process of torchrun ended; continue with --resume") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that training continues from."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    stage: str
    done: int
    """Steps or updates."""
    settings: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, optimizer: Any, settings: Settings, *, stage: str, done: int, **more: Any) -> Self:
        return cls(
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
            stage=stage,
            done=done,
            settings=fingerprint(settings, stage=stage),
            more=more,
        )


def save_state(directory: Path, state: RunState) -> None:
    """Replace the saved state. A crash leaves the earlier one."""
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f"{_FILE}.new"
    torch.save({name: getattr(state, name) for name in state.__slots__}, new)
    new.replace(directory / _FILE)


def load_state(directory: Path, settings: Settings | None, *, stage: str, resume: bool = True) -> RunState | None:
    """Return the saved state, or None if there is none.

    Raises:
        LearnError: There is a state that must not be continued.
    """
    path = directory / _FILE
    if not path.exists():
        return None
    if not resume:
        raise LearnError(f"stage {stage} {directory}: it has a saved state; add --resume, or choose another --run")
    try:
        state = RunState(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise LearnError(f"stage {stage} {path}: the state cannot be read: {error}; restore or remove it") from error
    if settings is not None and (changed := _changes(state.settings, fingerprint(settings, stage=stage))):
        raise LearnError(f"stage {stage} {directory}: other settings than its state's: {changed}; use the old ones")
    return state


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    found: list[str] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += filter(None, [_changes(before, after, f"{prefix}{key}.")])
        elif before != after and not _is_same(key, before, after):
            found.append(f"{prefix}{key} was {json.dumps(before)} and is {json.dumps(after)}")
    return ", ".join(found)


def _is_same(key: str, before: object, after: object) -> bool:
    """Return whether a setting that only one of two releases has changes nothing."""
    return not after if before is None else after is None and _FORMER.get(key) == before
