"""A Qwen3-VL of two layers with random weights that runs on a CPU, and a tokenizer trained in place."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from trainer.learn import checkpoint


def write_checkpoint(directory: Path, *, vocabulary: Iterable[str] = (), seed: int = 0) -> Path:
    """Write the model, its tokenizer and its processor; see `trainer.learn.checkpoint.write_checkpoint`."""
    return checkpoint.write_checkpoint(directory, vocabulary=vocabulary, seed=seed)


def write_other_weights(directory: Path, *, like: Path, seed: int = 1) -> Path:
    """Write a copy of a checkpoint with other weights."""
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    shutil.copytree(like, directory)
    torch.manual_seed(seed)
    Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(like)).save_pretrained(directory)
    return directory
