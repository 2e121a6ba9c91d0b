"""Stand-ins of packages that slime imports and a CPU does not have, with what slime's whole argument parser needs."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.learn.slime_job import StandIns


@dataclass
class _ServerArgs:
    """`sglang.srt.server_args.ServerArgs`: the fields that slime sets."""

    model_path: str = ""
    host: str = ""
    port: int = 0
    node_rank: int = 0
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    enable_memory_saver: bool = False

    @staticmethod
    def add_cli_args(parser: Any) -> None:
        for name in ("dp", "pp", "ep", "moe-dp"):
            parser.add_argument(f"--{name}-size", type=int, default=1)
        for name in ("dp-attention", "deterministic-inference"):
            parser.add_argument(f"--enable-{name}", action="store_true")


def _parse_megatron_args(extra_args_provider: Callable[[Any], Any], **_: object) -> argparse.Namespace:
    """Parse the options of Megatron that slime reads, and slime's own."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("load", "save", "tokenizer-model", "tokenizer-type"):
        parser.add_argument(f"--{name}")
    for name in ("save-interval", "seq-length", "max-position-embeddings", "vocab-size", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--rotary-base", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--fp16", action="store_true")
    parser.set_defaults(decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None)
    args: argparse.Namespace = extra_args_provider(parser).parse_known_args()[0]
    return args


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "sglang.srt.server_args": {"ServerArgs": _ServerArgs},
    "megatron.training.arguments": {"parse_args": _parse_megatron_args, "validate_args": lambda _: None},
}


def install(*, replacing: bool = False) -> None:
    """Let imports of packages find stand-ins, unless the packages are installed or if `replacing`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, StandIns)]
    sys.meta_path.insert(0 if replacing else len(sys.meta_path), StandIns(_ATTRIBUTES))
