"""Supervised warm-up: one untrained placeholder per image token."""

from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tests.support.slime import IMAGE, Processor, Sample, Tokenizer
from trainer.config import InputError
from trainer.slime import hooks, slime_compat
from trainer.slime.hooks import generate_rollout


class Masks:
    """Trains capital letters."""

    def get_loss_mask(self, messages: str, tools: object = None) -> tuple[list[int], list[int]]:
        ids = Tokenizer().encode(messages)
        return ids, [int(len(text) == 1 and text.isupper()) for text in (Tokenizer().decode([one]) for one in ids)]


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_compat, "sft_tools", lambda checkpoint, kind: (Tokenizer(), Processor(), Masks()))
    hooks._warmup_tools.cache_clear()


def example(conversation: str, *, image_count: int) -> Sample:
    images = [Image.new("RGB", (64, 32))] * image_count  # of two tokens
    return Sample(index=4, label="a/b", prompt=conversation, multimodal_inputs={"images": images})


def made(sample: Sample) -> Any:
    args = SimpleNamespace(hf_checkpoint="x", loss_mask_type="qwen3_5", rollout_batch_size=1)
    [[filled]] = generate_rollout(args, 0, SimpleNamespace(get_samples=lambda count: [[sample]] * count))
    return filled


def test_a_placeholder_is_repeated_per_image_token_and_not_trained() -> None:
    sample = made(example(f"a{IMAGE}bCd{IMAGE}E", image_count=2))
    assert sample.tokens == Tokenizer().encode(f"a{IMAGE}{IMAGE}bCd{IMAGE}{IMAGE}E")
    assert sample.loss_mask == [1, 0, 0, 0, 1]
    assert sample.response_length == 5
    assert list(sample.multimodal_train_inputs["image_grid_thw"]) == [(1, 2, 4)] * 2


def test_a_conversation_without_images_has_no_tensors() -> None:
    sample = made(example("abC", image_count=0))
    assert (sample.tokens, sample.multimodal_train_inputs) == (Tokenizer().encode("abC"), None)


@pytest.mark.parametrize(
    ("conversation", "image_count", "complaint"),
    [
        (f"{IMAGE}C", 2, "made 1 placeholders for 2 images"),
        ("aC", 1, "made 0 placeholders for 1 images"),
        ("abc", 0, "no turn is trained"),
        ("C", 0, "first trained turn has no prompt"),
    ],
)
def test_invalid_examples_are_refused_by_name(conversation: str, image_count: int, complaint: str) -> None:
    with pytest.raises(InputError, match=rf"sample 4 \(a/b\): .*{complaint}"):
        made(example(conversation, image_count=image_count))


def test_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="no evaluation"):
        generate_rollout(None, 0, None, evaluation=True)
