"""A trajectory as it is kept: what was said and shown, what it was worth, and, if we sampled it, its very tokens.

As JSON it is a row that the readers of Slime-OSWorld take: `messages`, `images` (base64 or data URIs), `reward`,
`task_id`, `metadata`; `rows` is ours.
"""

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

IMAGE_PLACEHOLDER = "<image>"

_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    # How conversations name them that follow ShareGPT.
    "human": "user",
    "gpt": "assistant",
}


class MalformedRow(ValueError):
    """A row is no trajectory; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One append-only context as the engine saw and sampled it.

    Raises:
        MalformedRow: Lengths do not agree.
    """

    tokens: tuple[int, ...]
    """Prompt and response, as the trainer counts them: images expanded."""
    response_length: int
    """Tokens from the first sampled one on."""
    loss_mask: tuple[int, ...]
    """For the response: 1 where the model spoke."""
    log_probs: tuple[float, ...]
    """For the response, of the policy that sampled it; 0.0 where the mask is 0."""
    images: tuple[int, ...] = ()
    """Indices into the trajectory's images, in order of appearance."""

    def __post_init__(self) -> None:
        count = self.response_length
        if not (count >= 1 and len(self.loss_mask) == len(self.log_probs) == count and len(self.tokens) > count):
            raise MalformedRow(
                f"a row of {len(self.tokens)} tokens with {count} of response has a mask of {len(self.loss_mask)} and"
                f" {len(self.log_probs)} log-probabilities; each token of the response has one of both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """Something that was done, by whomever."""

    task_id: str
    messages: tuple[Mapping[str, Any], ...]
    """`role` and `content` each; a text with `<image>` for each image, or a list of parts."""
    images: tuple[str, ...] = ()
    """Base64 or data URIs, in order of appearance."""
    reward: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[TokenRow, ...] = ()
    """As sampled, with the log-probabilities of then. Empty for a demonstration: nobody knows how likely it was."""

    @property
    def base_id(self) -> str:
        """The task that it is a part of: its id without `_chunkN`."""
        return base_id(self.task_id)

    @property
    def messages_sha1(self) -> str:
        """Names what was said: roles and contents, whatever the order of keys and whatever is trained of it."""
        said = [{"role": message["role"], "content": message["content"]} for message in self.messages]
        return hashlib.sha1(canonical(said).encode(), usedforsecurity=False).hexdigest()

    @property
    def digest(self) -> str:
        """Names all of it."""
        return hashlib.sha256(canonical(self.as_row()).encode()).hexdigest()

    def as_row(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        row: dict[str, Any] = {
            "task_id": self.task_id,
            "messages": list(self.messages),
            "images": list(self.images),
            "reward": self.reward,
            "metadata": dict(self.metadata),
        }
        if self.rows:
            row["rows"] = [asdict(each) for each in self.rows]
        return row

    @classmethod
    def from_row(cls, row: object) -> Self:
        """Read a JSON object.

        The id is `metadata.task_id`, else `id`, else `task_id`. A row without `reward` is a demonstration: 1.0.

        Raises:
            MalformedRow: It is no trajectory.
        """
        if not isinstance(row, Mapping):
            raise MalformedRow(f"it is {_kind(row)}, not an object")
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise MalformedRow(f"metadata is {_kind(metadata)}, not an object")
        images = row.get("images") or ()
        if not isinstance(images, list | tuple):
            raise MalformedRow(f"images is {_kind(images)}, not a list")
        return cls(
            task_id=_task_id(row, metadata),
            messages=_messages(row.get("messages") or row.get("conversations")),
            images=tuple(_image(image, index) for index, image in enumerate(images)),
            reward=_reward(row.get("reward", 1.0)),
            metadata=dict(metadata),
            rows=tuple(_token_row(each) for each in row.get("rows") or ()),
        )


def base_id(task_id: str) -> str:
    """Return the id without a trailing `_chunkN`."""
    head, mark, _ = task_id.rpartition("_chunk")
    return head if mark else task_id


def canonical(value: object) -> str:
    """Return the one JSON text of a value, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=dict)


def image_bytes(image: str) -> bytes:
    """Return the file that a base64 text or a data URI holds. Raises: MalformedRow."""
    head, comma, body = image.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise MalformedRow(f"an image begins with {head[:40]!r}; it must be base64, or data:...;base64,...")
    try:
        return base64.b64decode(body if comma else image, validate=True)
    except binascii.Error as error:
        raise MalformedRow(f"an image is not base64: {error}") from error


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _task_id(row: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    given = metadata.get("task_id") or row.get("id") or row.get("task_id")
    if given is None or given == "":
        raise MalformedRow("it names no task: metadata.task_id, id and task_id are missing")
    if not isinstance(given, str):
        raise MalformedRow(f"the task id is {_kind(given)}, not a text")
    return given


def _reward(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MalformedRow(f"reward is {value!r}, not a number")
    return float(value)


def _messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list | tuple) or not value:
        raise MalformedRow("it has no messages and no conversations")
    return tuple(_message(message, index) for index, message in enumerate(value))


def _message(message: object, index: int) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise MalformedRow(f"message {index} is {_kind(message)}, not an object")
    role = _ROLES.get(str(message.get("role", message.get("from"))))
    content = message.get("content", message.get("value"))
    if role is None:
        raise MalformedRow(f"message {index} has no role of {', '.join(sorted(_ROLES))}")
    if not isinstance(content, str | list):
        raise MalformedRow(f"content of message {index} is {_kind(content)}, not a text or a list of parts")
    return {**{key: message[key] for key in message if key in _KEPT}, "role": role, "content": content}


#: slime's own mark of a turn that is not trained.
_KEPT = ("step_loss_mask",)


def _image(image: object, index: int) -> str:
    if not isinstance(image, str):
        raise MalformedRow(f"image {index} is {_kind(image)}, not a text")
    image_bytes(image)
    return image


def _token_row(row: object) -> TokenRow:
    if not isinstance(row, Mapping):
        raise MalformedRow(f"a row of tokens is {_kind(row)}, not an object")
    try:
        return TokenRow(
            tokens=_numbers(row["tokens"], int),
            response_length=int(row["response_length"]),
            loss_mask=_numbers(row["loss_mask"], int),
            log_probs=_numbers(row["log_probs"], float),
            images=_numbers(row.get("images", ()), int),
        )
    except (KeyError, TypeError) as error:
        raise MalformedRow(f"rows: {error!r}") from error


def _numbers(values: Sequence[Any], kind: type[Any]) -> tuple[Any, ...]:
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError("not all are numbers")
    return tuple(kind(value) for value in values)
