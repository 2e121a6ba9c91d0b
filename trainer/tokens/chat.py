"""Messages to token ids, by the model's own chat template, tokenizer and image processor.

What is said later is rendered behind a stand-in for the reply before it, and cut off there: so the ids of a row are
never made anew, and the template still decides what stands between two messages.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.agent.types import Message, ModelFailed
from trainer.tokens.rows import Segment

if TYPE_CHECKING:
    from PIL import Image

_REPLY = "\u241ereply\u241e"  # a stand-in that no template has a rule for


class Chat:
    """How one model reads. Holds no state of an episode, so one serves them all."""

    def __init__(
        self, tokenizer: Any, processor: Any = None, *, template_options: Mapping[str, Any] | None = None
    ) -> None:
        """Take what was loaded from the checkpoint.

        Args:
            tokenizer: A transformers tokenizer.
            processor: A transformers processor of the Qwen-VL kind, or None for a model that reads text alone.
            template_options: More arguments for the chat template, such as `enable_thinking`.
        """
        self._tokenizer = tokenizer
        self._processor = processor
        self._options = dict(template_options or {})
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        self.image_id: int | None = None
        """The placeholder of an image; None for a model without eyes."""
        if processor is not None:
            self.image_id = int(tokenizer.convert_tokens_to_ids(processor.image_token))

    def opening(self, messages: Sequence[Message]) -> Segment:
        """Return a row's prompt, up to where the model speaks. Raises: ModelFailed."""
        return self._segment(self._render(messages), messages)

    def following(self, message: Message, *, last_id: int | None) -> Segment:
        """Return what stands between a reply and the next one.

        Args:
            message: What the model is shown.
            last_id: The id that the reply ended with: its end-of-turn token is not said twice, and one that was cut
                off gets it.

        Raises:
            ModelFailed: The template dropped the message, or it holds an image that the model cannot read.
        """
        before = [Message("user", ("-",)), Message("assistant", (_REPLY,))]
        text = self._render([*before, message])
        _, mark, text = text.rpartition(_REPLY)
        if not mark:
            raise ModelFailed("the chat template leaves replies out, so nothing can follow one")
        segment = self._segment(text, [message])
        if segment.engine_ids and segment.engine_ids[0] == last_id:
            said = self.decode([last_id])
            return Segment(
                text=text.removeprefix(said),
                engine_ids=segment.engine_ids[1:],
                train_ids=segment.train_ids[1:],
                images=segment.images,
            )
        return segment

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def reply_text(self, text: str, token_ids: Sequence[int]) -> str:
        """Return a reply's text without the special token that ended it."""
        if not token_ids or self._special is None:
            return text
        last = self.decode(token_ids[-1:])
        return text.removesuffix(last) if self._special.fullmatch(last) else text

    def image_token_count(self, width_px: int, height_px: int) -> int:
        """Return how many tokens an image of that size has. Raises: ModelFailed for a model without eyes."""
        if self._processor is None:
            raise ModelFailed("the model reads no images: its checkpoint has no processor; set `text_only: true`")
        images = self._processor.image_processor
        return int(images.get_number_of_image_patches(height_px, width_px, {})) // int(images.merge_size) ** 2

    def tensors(self, images: "Sequence[Image.Image]", train_ids: Sequence[int]) -> dict[str, Any] | None:
        """Return what the model takes for images: tensors joined on dimension 0, floats as bfloat16; None for none.

        The trainer casts to bfloat16 anyway, and the batch passes through one process: half the bytes.

        Args:
            images: Those of a row, in order of appearance.
            train_ids: The row's ids, which must have their placeholders.

        Raises:
            ModelFailed: The ids have another number of placeholders than the images have tokens.
        """
        if not images:
            return None
        taken = self._processor.image_processor(images=list(images), return_tensors="pt")
        token_count = (
            int(taken["image_grid_thw"].prod(dim=1).sum()) // int(self._processor.image_processor.merge_size) ** 2
        )
        placeholder_count = sum(token_id == self.image_id for token_id in train_ids)
        if token_count != placeholder_count:
            raise ModelFailed(
                f"{len(images)} images have {token_count} tokens, and the row has {placeholder_count} placeholders"
            )
        return {key: value.bfloat16() if value.is_floating_point() else value for key, value in taken.items()}

    def _render(self, messages: Sequence[Message]) -> str:
        render: Callable[..., str] = self._tokenizer.apply_chat_template
        if self._processor is not None and getattr(self._processor, "chat_template", None):
            render = self._processor.apply_chat_template
        content = [{"role": message.role, "content": self._content(message)} for message in messages]
        return render(content, tokenize=False, add_generation_prompt=True, **self._options)

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        if all(isinstance(part, str) for part in message.parts):
            return "".join(self._harmless(part) for part in message.parts if isinstance(part, str))
        return [
            {"type": "text", "text": self._harmless(part)} if isinstance(part, str) else {"type": "image"}
            for part in message.parts
        ]

    def _harmless(self, text: str) -> str:
        """Break up what the tokenizer would read as a special token: a guest's screen text must not end a turn."""
        return text if self._special is None else self._special.sub(lambda found: " ".join(found[0]), text)

    def _segment(self, text: str, messages: Sequence[Message]) -> Segment:
        images = tuple(part for message in messages for part in message.parts if not isinstance(part, str))
        engine_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if sum(token_id == self.image_id for token_id in engine_ids) != len(images):
            raise ModelFailed(f"the chat template made another number of placeholders than the {len(images)} images")
        counts = iter([self.image_token_count(image.width, image.height) for image in images])
        train_ids = tuple(
            token_id
            for placed in engine_ids
            for token_id in ([placed] * next(counts) if placed == self.image_id else [placed])
        )
        return Segment(text=text, engine_ids=engine_ids, train_ids=train_ids, images=images)
