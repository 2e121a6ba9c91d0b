"""The manifest of a checkpoint: what it is of, its files, and the episode's spec and progress at that time.

Manifests of format 1, which envd 0.2.0 wrote, are read; what they lack is empty. Pure.
"""

from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from envd.episodes.progress import EpisodeSpec, Moment, Progress, ShortText

_FORMAT: Final = 2


class NewerManifest(ValueError):
    """A newer release of envd wrote a manifest."""


class StoredFile(BaseModel):
    """A file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: Annotated[int, Field(ge=0, le=1 << 50)]
    digest: ShortText
    """xxh3-128 of its content, 32 hex digits."""


class Manifest(BaseModel):
    """The manifest of a checkpoint, stored with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = _FORMAT
    checkpoint_id: ShortText
    label: ShortText
    spec: EpisodeSpec
    """The episode's."""
    progress: Progress
    """The episode's, in the stored state. Its `last_checkpoint_id` is the parent of this checkpoint."""
    epoch: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    """The episode's, in which the state was."""
    template_digest: ShortText
    """Digest of the template whose memory and disk the state builds on."""
    frame_id: ShortText
    create_time: Moment
    expire_time: Moment
    pinned: bool
    trigger: ShortText = ""
    """Value of the `CheckpointTrigger` at which its episode stored it; empty if a request did."""
    fingerprint: ShortText
    """Digest of the request that created it; empty if none did."""
    files: Annotated[dict[str, StoredFile], Field(max_length=64)] = {}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def start(self) -> Progress:
        """Progress of an episode that continues from its state."""
        return replace(self.progress.reopened(), last_checkpoint_id=self.checkpoint_id)


def parse_manifest(text: bytes) -> Manifest:
    """Return the manifest of any format up to this release's.

    Raises:
        NewerManifest: Only a newer release can read it.
        ValueError: It is not a manifest.
    """
    value = from_json(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 -- like every other malformed manifest
    number = value.get("format", 1)
    if isinstance(number, int) and number > _FORMAT:
        raise NewerManifest(f"format {number} is of a newer envd; this one reads up to {_FORMAT}")
    return Manifest.model_validate_json(text) if number == _FORMAT else Manifest.model_validate(_from_1(value))


def _from_1(value: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of format 1 as one of format 2. Raises: ValueError: a field is missing."""
    old = dict(value)
    try:
        spec = {name: old.pop(name) for name in _SPEC_OF_1}
        progress = {"step_count": old.pop("step_count"), "last_checkpoint_id": old.pop("parent_checkpoint_id")}
        # Format 1 had neither the episode's group nor how it began.
        origin = {"template_digest": old["template_digest"], "overlay_parent": "", "first_frame_id": ""}
        spec |= {"group_id": "", "origin": origin, "create_time": old["create_time"]}
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: is missing") from error
    progress |= {name: old.pop(name) for name in ("asked", "perturbations") if name in old}
    return {**old, "format": _FORMAT, "spec": spec, "progress": progress}


_SPEC_OF_1: Final = ("episode_id", "task_id", "task_digest", "pool", "run", "owner", "max_steps", "settle")
