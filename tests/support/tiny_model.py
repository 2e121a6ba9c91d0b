"""A copy of the tiny model of `trainer.learn.checkpoint` with other weights."""

import shutil
from pathlib import Path


def write_other_weights(directory: Path, *, like: Path, seed: int = 1) -> Path:
    """Write a copy of a checkpoint with other weights."""
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    shutil.copytree(like, directory)
    torch.manual_seed(seed)
    Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(like)).save_pretrained(directory)
    return directory
