"""Write a small Qwen3-VL with random weights, and a tokenizer trained in place.

The checkpoint loads by `AutoTokenizer`, `AutoProcessor` and `AutoModelForImageTextToText`. Images, grids and positions
are treated as in the large models. Needs torch and transformers.
"""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainer.learn import LearnError

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
_CHAT_TEMPLATE = (files("trainer.learn") / "chat_template.jinja").read_text(encoding="utf-8")
#: transformers' own class needs a video processor and so torchvision; this one is stored with the weights.
_PROCESSOR_CODE = (files("trainer.learn") / "processing_tiny.txt").read_text(encoding="utf-8")


#: What differs between replies: digits, and typed texts.
_VARIABLE = re.compile(r'\d|(?<="text": ")[^"]*')
_SHORTEST_PIECE = 4
_PACKED = "packed.safetensors"
_SCALE = ".scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of a model."""

    text_layers: int
    text_width: int
    text_inner: int
    vision_layers: int
    vision_width: int
    vision_inner: int
    head_dim: int
    deepstack: tuple[int, ...]
    """Vision layers whose output is added to the first text layers."""
    initializer_range: float = 0.02


TINY = ModelSize(
    text_layers=2,
    text_width=64,
    text_inner=128,
    vision_layers=2,
    vision_width=64,
    vision_inner=128,
    head_dim=16,
    deepstack=(0,),
    # Large enough that log-probabilities differ between tokens and images.
    initializer_range=0.2,
)
#: 51 million parameters.
SMALL = ModelSize(
    text_layers=8,
    text_width=512,
    text_inner=1536,
    vision_layers=6,
    vision_width=384,
    vision_inner=1536,
    head_dim=64,
    deepstack=(1, 3, 5),
)
SIZES = {"tiny": TINY, "small": SMALL}


def write_checkpoint(
    directory: Path,
    *,
    vocabulary: Iterable[str] = (),
    pieces: Sequence[str] = (),
    size: ModelSize = TINY,
    seed: int = 0,
) -> Path:
    """Write the model, its tokenizer and its processor.

    Args:
        vocabulary: Texts to train the tokenizer on; other texts take one token per byte.
        pieces: Texts that become one token each wherever they occur, such as a constant system message.
    """
    import torch  # noqa: PLC0415 -- only needed to write a model
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(vocabulary, pieces)
    processor = _processor(directory, tokenizer)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    section = size.head_dim // 8
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": size.text_width,
        "intermediate_size": size.text_inner,
        "num_hidden_layers": size.text_layers,
        "num_attention_heads": size.text_width // size.head_dim,
        "num_key_value_heads": max(1, size.text_width // size.head_dim // 2),
        "head_dim": size.head_dim,
        "max_position_embeddings": 32768,
        "initializer_range": size.initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2 * section, section, section],
            # SGLang reads it; transformers always interleaves.
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": size.vision_layers,
        "hidden_size": size.vision_width,
        "intermediate_size": size.vision_inner,
        "num_heads": size.vision_width // size.head_dim,
        "out_hidden_size": size.text_width,
        "patch_size": 16,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": list(size.deepstack),
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def constant_pieces(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return the constant texts of messages (role, content): system messages, and what replies have in common."""
    given = list(texts)
    system = {text for role, text in given if role == "system"}
    replies = (text for role, text in given if role == "assistant")
    fragments = {piece for text in replies for piece in _VARIABLE.split(text) if len(piece) >= _SHORTEST_PIECE}
    return [*sorted(system), *sorted(fragments)]


def pack_checkpoint(checkpoint: Path, weights: Mapping[str, Any], directory: Path) -> None:
    """Write weights of the model of a checkpoint with 8 bits each, next to its tokenizer and processor.

    A matrix is stored as int8, with one scale for each of its rows; vectors are stored as bfloat16.
    """
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    packed: dict[str, Any] = {}
    for name, value in weights.items():
        weight = value.detach().float().cpu()
        if weight.ndim < 2:
            packed[name] = weight.bfloat16()
            continue
        scale = (weight.flatten(1).abs().amax(1) / 127).clamp(min=1e-12)
        rows = scale.view(-1, *[1] * (weight.ndim - 1))
        packed[name] = (weight / rows).round().to(torch.int8)
        packed[name + _SCALE] = scale
    directory.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, directory / path.name)
    save_file(packed, directory / f"{_PACKED}.new")
    (directory / f"{_PACKED}.new").replace(directory / _PACKED)


def is_packed(directory: Path) -> bool:
    return (directory / _PACKED).exists()


def read_packed(directory: Path) -> dict[str, Any]:
    """Return the weights of a packed checkpoint in float32. Raises: LearnError: They cannot be read."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    try:
        stored = load_file(directory / _PACKED)
    except (OSError, SafetensorError) as error:
        raise LearnError(f"base {directory}: cannot be read: {error}; train it again by the stage `base`") from error
    scales = {name: stored.pop(name + _SCALE) for name in [*stored] if name + _SCALE in stored}
    weights = {name: value.float() for name, value in stored.items()}
    for name, scale in scales.items():
        weights[name] *= scale.view(-1, *[1] * (weights[name].ndim - 1))
    return weights


def unpack_checkpoint(packed: Path, directory: Path, *, pieces: Sequence[str] = ()) -> Path:
    """Write a packed checkpoint as one that transformers loads.

    Args:
        packed: Directory of `pack_checkpoint`.
        pieces: Texts that become one token each, as those of `write_checkpoint`; the new ones have average weights.

    Raises:
        LearnError: It cannot be read.
    """
    import torch  # noqa: PLC0415
    from tokenizers import AddedToken  # noqa: PLC0415
    from transformers import AutoConfig, AutoProcessor, Qwen3VLForConditionalGeneration  # noqa: PLC0415

    weights = read_packed(packed)
    try:
        model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(packed))
        processor: Any = AutoProcessor.from_pretrained(packed, trust_remote_code=True)
        model.load_state_dict(weights)
    except (OSError, ValueError, RuntimeError) as error:
        raise LearnError(f"base {packed}: cannot be read: {error}; train it again by the stage `base`") from error
    tokenizer = processor.tokenizer
    missing = [piece for piece in pieces if len(tokenizer.encode(piece, add_special_tokens=False)) > 1]
    if missing:
        torch.manual_seed(0)
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in missing])
        model.resize_token_embeddings(len(tokenizer))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    for path in packed.iterdir():
        if path.name != _PACKED and not (directory / path.name).exists():
            shutil.copy(path, directory / path.name)
    processor.save_pretrained(directory)
    return directory


def _tokenizer(vocabulary: Iterable[str], pieces: Sequence[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    bytes_to_pieces = Tokenizer(models.BPE())
    # Single digits: numbers that were never seen keep their places.
    bytes_to_pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bytes_to_pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bytes_to_pieces.train_from_iterator(vocabulary, trainer)
    bytes_to_pieces.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_to_pieces,
        eos_token="<|im_end|>",  # noqa: S106 -- not a credential
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=[name for name in SPECIAL if name not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=_CHAT_TEMPLATE,
    )


def _processor(directory: Path, tokenizer: Any) -> Any:
    from transformers import Qwen2VLImageProcessorPil  # noqa: PLC0415
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # noqa: PLC0415

    (directory / "processing_tiny.py").write_text(_PROCESSOR_CODE, encoding="utf-8")
    kind: Any = get_class_from_dynamic_module("processing_tiny.TinyProcessor", str(directory))
    kind.register_for_auto_class("AutoProcessor")
    images = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, size={"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
    )
    return kind(images, tokenizer, chat_template=_CHAT_TEMPLATE)
