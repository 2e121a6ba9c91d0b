"""Trajectories as they are stored: messages, images, the reward and, for sampled ones, the tokens.

The JSON form is the row format of Slime-OSWorld's readers: `messages`, `images` (base64 or data URIs), `reward`,
`task_id`, `metadata`. The fields `rows` and `start` are extensions.
"""

import base64
import binascii
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from cuaenv.problems import first_problem
from trainer.config import InputError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_PLACEHOLDER = "<image>"

_ROLES = ("system", "user", "assistant", "tool")
#: Roles of conversations in ShareGPT's form.
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
#: slime's mark of a turn that is not trained, and who acted in a turn of an assistant, `agent` or `human`.
_OPTIONAL_KEYS = ("step_loss_mask", "source")


def _message(given: object) -> Mapping[str, Any]:
    """Return a message with the keys that are stored. Raises: InputError."""
    if not isinstance(given, Mapping):
        raise InputError("a message must be a JSON object")
    message = {"role": given.get("from"), "content": given.get("value"), **given}
    role, content = _SHAREGPT_ROLES.get(str(message["role"]), message["role"]), message["content"]
    if role not in _ROLES:
        raise InputError(f"role {role!r} is not one of {', '.join(_ROLES)}")
    if not isinstance(content, str | list):
        raise InputError(f"content is a {type(content).__name__}; it must be a text or a list of parts")
    return {"role": role, "content": content, **{key: message[key] for key in _OPTIONAL_KEYS if key in message}}


def _image(image: str) -> str:
    image_bytes(image)
    return image


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One append-only context, with the tokens that the engine read and sampled.

    Raises:
        InputError: The lengths do not match.
    """

    tokens: tuple[StrictInt, ...]
    """Prompt and response as the trainer counts them, with expanded images."""
    response_length: StrictInt
    """Tokens from the first sampled one on."""
    loss_mask: tuple[StrictInt, ...]
    """Mask of the response: 1 for sampled tokens."""
    log_probs: tuple[StrictFloat, ...]
    """Log-probabilities of the response under the policy that sampled it; 0.0 where the mask is 0."""
    images: tuple[StrictInt, ...] = ()
    """Indices into the trajectory's images, in order of appearance."""

    def __post_init__(self) -> None:
        count = self.response_length
        if not (count >= 1 and len(self.loss_mask) == len(self.log_probs) == count and len(self.tokens) > count):
            raise InputError(
                f"a row of {len(self.tokens)} tokens with {count} of response has a mask of {len(self.loss_mask)} and"
                f" {len(self.log_probs)} log-probabilities; each token of the response needs one of both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory of the policy or a demonstration."""

    task_id: Annotated[str, Field(min_length=1)]
    messages: Annotated[tuple[Annotated[Mapping[str, Any], BeforeValidator(_message)], ...], Field(min_length=1)]
    """Each with `role` and `content`, which is a text with `<image>` placeholders or a list of parts."""
    images: tuple[Annotated[str, AfterValidator(_image)], ...] = ()
    """Base64 or data URIs, in order of appearance."""
    reward: Annotated[StrictFloat, Field(allow_inf_nan=False)] = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[TokenRow, ...] = ()
    """Tokens and log-probabilities as sampled. Empty for a demonstration, which has no log-probabilities."""
    start: StrictStr = ""
    """Identifies the state and the prompt that it began with, in any form; see `ReplayPool.pick`."""

    @property
    def base_id(self) -> str:
        """The id without `_chunkN`."""
        return base_id(self.task_id)

    @property
    def messages_sha1(self) -> str:
        """Digest of roles and contents, independent of key order and masks."""
        contents = [{"role": message["role"], "content": message["content"]} for message in self.messages]
        return hashlib.sha1(canonical(contents).encode(), usedforsecurity=False).hexdigest()

    @property
    def digest(self) -> str:
        """Digest of the complete row."""
        return hashlib.sha256(canonical(self.as_row()).encode()).hexdigest()

    def as_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "task_id": self.task_id,
            "messages": list(self.messages),
            "images": list(self.images),
            "reward": self.reward,
            "metadata": dict(self.metadata),
        }
        if self.start:
            row["start"] = self.start
        if self.rows:
            row["rows"] = [asdict(token_row) for token_row in self.rows]
        return row

    @staticmethod
    def from_row(row: object) -> "StoredTrajectory":
        """Parse a JSON object.

        The id is `metadata.task_id`, else `id`, else `task_id`. A row without `reward` is a demonstration: 1.0.

        Raises:
            InputError: It is not a valid trajectory.
        """
        if not isinstance(row, Mapping):
            raise InputError(f"a row must be a JSON object, not {type(row).__name__}")
        metadata = row.get("metadata") or {}
        named = metadata.get("task_id") if isinstance(metadata, Mapping) else None
        try:
            return _ADAPTER.validate_python(
                {
                    "task_id": named or row.get("id") or row.get("task_id"),
                    "messages": row.get("messages") or row.get("conversations"),
                    "images": row.get("images") or [],
                    "reward": row.get("reward", 1.0),
                    "metadata": metadata,
                    "rows": row.get("rows") or [],
                    "start": row.get("start", ""),
                }
            )
        except ValidationError as error:
            raise InputError(first_problem(error.errors())) from error


_ADAPTER = TypeAdapter(StoredTrajectory)


def base_id(task_id: str) -> str:
    """Return the id without a trailing `_chunkN`."""
    head, mark, _ = task_id.rpartition("_chunk")
    return head if mark else task_id


def canonical(value: object) -> str:
    """Return the canonical JSON text of a value, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=dict)


def image_bytes(image: str) -> bytes:
    """Decode a base64 text or a data URI. Raises: InputError."""
    head, comma, body = image.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise InputError(f"an image begins with {head[:40]!r}; it must be base64, or data:...;base64,...")
    try:
        return base64.b64decode(body if comma else image, validate=True)
    except binascii.Error as error:
        raise InputError(f"an image is not base64: {error}") from error


def image_of(image: str) -> "Image.Image":
    """Return the picture of a base64 text or a data URI, in RGB. Raises: InputError, OSError."""
    from PIL import Image  # noqa: PLC0415 -- only pictures need it

    return Image.open(io.BytesIO(image_bytes(image))).convert("RGB")
