"""The examples of a supervised warm-up with images, for `trainer.slime.hooks.generate_rollout`.

slime's own `slime.rollout.sft_rollout` (624b824a8) tokenises the text only: an image becomes one placeholder, and its
pixels are lost. Here each placeholder is repeated once per image token, and the pixels are added. Masks are slime's
(`--loss-mask-type`), so turns with `step_loss_mask` 0 are not trained. Rows come from `trainer data export-sft`:
`--input-key messages --multimodal-keys '{"image": "images"}'`, without `--apply-chat-template`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from trainer.slime.slime_compat import Sample
from trainer.tokens.chat import Chat


class CannotTrain(ValueError):
    """A conversation is not a valid example: it has no trained turn, or its images do not match its text."""


def fill_conversation(sample: Sample, chat: Chat, masks: Any) -> None:
    """Fill a sample with the tokens, masks and image tensors of its conversation. Raises: CannotTrain, ModelFailed."""
    images = (sample.multimodal_inputs or {}).get("images") or []
    ids, mask = masks.get_loss_mask(sample.prompt, tools=(sample.metadata or {}).get("tools"))
    counts = [chat.image_token_count(image.width, image.height) for image in images]
    pairs = list(expanded(ids, mask, image_id=chat.image_id, counts=counts))
    tokens, loss_mask = [token for token, _ in pairs], [one for _, one in pairs]
    if 1 not in loss_mask or loss_mask[0] == 1:
        raise CannotTrain("no turn is trained, or the first trained turn has no prompt")
    sample.tokens = tokens
    sample.loss_mask = loss_mask[loss_mask.index(1) :]
    sample.response_length = len(sample.loss_mask)
    sample.reward = 0.0
    sample.multimodal_train_inputs = chat.tensors([image.convert("RGB") for image in images], tokens)


def expanded(
    ids: Sequence[int], mask: Sequence[int], *, image_id: int | None, counts: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield ids with their masks, repeating each image's placeholder once per image token.

    Raises:
        CannotTrain: The numbers of placeholders and images differ.
    """
    if ids.count(image_id) != len(counts):
        raise CannotTrain(f"the chat template made {ids.count(image_id)} placeholders for {len(counts)} images")
    remaining = iter(counts)
    for token, one in zip(ids, mask, strict=True):
        yield from [(token, one)] * (next(remaining) if token == image_id else 1)
