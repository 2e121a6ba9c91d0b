"""Convert messages to token ids with the model's own chat template, tokenizer and image processor.

A later message is rendered after a placeholder for the previous reply, and the text up to the placeholder is cut off.
So the ids of a row are never recomputed, and the template still determines the text between two messages.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from trainer.agent.types import Message, ModelFailed, broken_up, without_control_tokens
from trainer.tokens.patches import image_tensors
from trainer.tokens.rows import Segment

if TYPE_CHECKING:
    from PIL import Image

_REPLY = "\u241ereply\u241e"  # a placeholder without a meaning in any template


class Chat:
    """The chat format of one model. Without episode state, so all episodes share one instance."""

    def __init__(
        self, tokenizer: Any, processor: Any = None, *, template_options: Mapping[str, Any] | None = None
    ) -> None:
        """Use the objects loaded from a checkpoint.

        Args:
            tokenizer: A transformers tokenizer.
            processor: A transformers processor of the Qwen-VL kind, or None for a text-only model.
            template_options: Additional arguments of the chat template, such as `enable_thinking`.
        """
        self._tokenizer = tokenizer
        self._processor = processor
        self._options = dict(template_options or {})
        self._special_by_id = {
            token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        special = sorted(self._special_by_id.values(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self.image_id: int | None = None
        """The placeholder of an image; None for a text-only model."""
        self._placeholders: tuple[str, ...] = ()
        if processor is not None:
            self.image_id = int(tokenizer.convert_tokens_to_ids(processor.image_token))
            tokens = [getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio")]
            self._placeholders = tuple(token for token in tokens if isinstance(token, str))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Chat":
        """Return this format with functions, as JSON schemas that the template describes to the model."""
        chat = copy(self)
        chat._options = {**self._options, "tools": [self._escaped_in(tool) for tool in tools]}
        return chat

    def opening(self, messages: Sequence[Message]) -> Segment:
        """Return a row's prompt, up to the start of the model's reply. Raises: ModelFailed."""
        return self._segment(self._render(messages), messages)

    def following(self, *messages: Message, last_id: int | None) -> Segment:
        """Return the tokens between a reply and the next one.

        Args:
            messages: The observation.
            last_id: The reply's last id. Its end-of-turn token is not repeated; a reply that was cut off gets one.

        Raises:
            ModelFailed: The template dropped a message, or one has an image that the model cannot read.
        """
        before = [Message("user", ("-",)), Message("assistant", (_REPLY,))]
        text = self._render([*before, *messages])
        _, mark, text = text.rpartition(_REPLY)
        if not mark:
            raise ModelFailed("the chat template drops replies, so no message can follow one")
        segment = self._segment(text, messages)
        if segment.engine_ids and segment.engine_ids[0] == last_id:
            return Segment(
                text=text.removeprefix(self.decode([last_id])),
                engine_ids=segment.engine_ids[1:],
                train_ids=segment.train_ids[1:],
                images=segment.images,
            )
        return segment

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens at its ends."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def placeholder_in(self, token_ids: Sequence[int]) -> str | None:
        """Return a placeholder of an image, a video or audio in ids, or None.

        Text that only spells one counts too: engines search the decoded prompt.
        """
        text = self.decode(token_ids) if self._placeholders else ""
        return next((token for token in self._placeholders if token in text), None)

    def reply_text(self, text: str, token_ids: Sequence[int]) -> str:
        """Return a reply's text without the special token that ended it."""
        return text.removesuffix(self._special_by_id.get(token_ids[-1], "")) if token_ids else text

    def image_token_count(self, width_px: int, height_px: int) -> int:
        """Return the number of tokens of an image. Raises: ModelFailed: The model is text-only."""
        if self._processor is None:
            raise ModelFailed("the model reads no images: its checkpoint has no processor; set `text_only: true`")
        images = self._processor.image_processor
        return int(images.get_number_of_image_patches(height_px, width_px, {})) // int(images.merge_size) ** 2

    def repeats(self, token_ids: Sequence[int], images: "Sequence[Image.Image]") -> list[int]:
        """Return how often each id of a prompt occurs for training: placeholders once per token of their image.

        Raises:
            ModelFailed: The model is text-only, or the numbers of placeholders and images differ.
        """
        counts = iter([self.image_token_count(image.width, image.height) for image in images])
        placeholder_count = sum(token_id == self.image_id for token_id in token_ids)
        if placeholder_count != len(images):
            raise ModelFailed(f"the chat template made {placeholder_count} placeholders for {len(images)} images")
        return [next(counts) if token_id == self.image_id else 1 for token_id in token_ids]

    def tensors(self, images: "Sequence[Image.Image]", train_ids: Sequence[int]) -> dict[str, Any] | None:
        """Return the model's image inputs: tensors joined on dimension 0, floats as bfloat16; None without images.

        Args:
            images: Images of a row, in order of appearance.
            train_ids: The row's ids.

        Raises:
            ModelFailed: The number of placeholders in the ids differs from the number of image tokens.
        """
        if not images:
            return None
        inputs = image_tensors(self._processor.image_processor, images)
        token_count = (
            int(inputs["image_grid_thw"].prod(dim=1).sum()) // int(self._processor.image_processor.merge_size) ** 2
        )
        placeholder_count = sum(token_id == self.image_id for token_id in train_ids)
        if token_count != placeholder_count:
            raise ModelFailed(
                f"{len(images)} images have {token_count} tokens, and the row has {placeholder_count} placeholders"
            )
        return inputs

    def _render(self, messages: Sequence[Message]) -> str:
        render: Callable[..., str] = self._tokenizer.apply_chat_template
        if self._processor is not None and getattr(self._processor, "chat_template", None):
            render = self._processor.apply_chat_template
        return render(list(map(self._entry, messages)), tokenize=False, add_generation_prompt=True, **self._options)

    def _entry(self, message: Message) -> dict[str, Any]:
        entry = {"role": message.role, "content": self._content(message)}
        calls = [{"type": "function", "function": self._escaped_in(call)} for call in message.calls]
        return {**entry, "tool_calls": calls} if calls else entry

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        if all(isinstance(part, str) for part in message.parts):
            return "".join(self._escaped(part) for part in message.parts if isinstance(part, str))
        return [
            {"type": "text", "text": self._escaped(part)} if isinstance(part, str) else {"type": "image"}
            for part in message.parts
        ]

    def _escaped(self, text: str) -> str:
        """Break up what only this tokenizer reads as a special token; `Message` breaks up those of known models."""
        return text if self._special is None else self._special.sub(broken_up, text)

    def _escaped_in(self, value: Any) -> Any:
        """Break up the special tokens in the texts of a JSON value."""
        match value:
            case str():
                return self._escaped(without_control_tokens(value))
            case Mapping():
                return {self._escaped_in(key): self._escaped_in(each) for key, each in value.items()}
            case list() | tuple():
                return list(map(self._escaped_in, value))
        return value

    def _segment(self, text: str, messages: Sequence[Message]) -> Segment:
        images = tuple(part for message in messages for part in message.parts if not isinstance(part, str))
        engine_ids = tuple(self.encode(text))
        repeats = zip(engine_ids, self.repeats(engine_ids, images), strict=True)
        train_ids = tuple(token_id for token_id, count in repeats for _ in range(count))
        return Segment(text=text, engine_ids=engine_ids, train_ids=train_ids, images=images)
