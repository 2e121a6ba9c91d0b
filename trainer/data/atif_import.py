"""Read documents of ATIF as demonstrations.

A document of our own is read back unchanged. One of another agent is written in the prompts and the grammar of
training, with its recorded pictures. What cannot be expressed is an `AtifError` that names the step.
"""

import base64
import io
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from PIL import Image
from pydantic import BaseModel, Field, ValidationError, model_validator

from cuaenv.action_codec import BadAction
from cuaenv.client import Action, Done, Fail
from cuaenv.frames.size import fit
from cuaenv.problems import problem_of, without_path
from trainer.agent.coordinates import CoordinateSpace, PointOutsidePicture, points_of, to_model_points
from trainer.agent.grammars import Grammar, UnsupportedAction
from trainer.agent.prompts import (
    RESULT_OK,
    ModelObservation,
    observation_message,
    prompt_hash,
    system_message,
    task_message,
)
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message
from trainer.data.atif import AGENT
from trainer.data.atif_actions import AtifError, actions_of
from trainer.data.record import Row
from trainer.replay.trajectory import IMAGE_PLACEHOLDER, MalformedRow, StoredTrajectory

#: Documents come from elsewhere. Those of Harbor have at most a few MiB, and screenshots too.
_MAX_DOCUMENT_BYTES, _MAX_IMAGE_BYTES, _MAX_PIXELS = 64 << 20, 32 << 20, 1 << 26
#: Of screenshots. Pillow's readers of others are slow on hostile data: that of PPM is quadratic in comments.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class _Model(BaseModel):
    """Later versions may add fields, so unknown ones are ignored; null is the same as absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


class _Source(_Model):
    media_type: str
    path: str


class _Part(_Model):
    type: Literal["text", "image", "audio"]
    text: str = ""
    source: _Source | None = None


_Content = str | list[_Part]


class _Call(_Model):
    function_name: str
    arguments: dict[str, Any]


class _Result(_Model):
    content: _Content = ""


class _Observation(_Model):
    results: list[_Result] = []


class _Step(_Model):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: _Content
    tool_calls: list[_Call] = []
    observation: _Observation = _Observation()
    is_copied_context: bool = False
    extra: dict[str, Any] = {}

    @property
    def images(self) -> list[_Source]:
        """All pictures, in order."""
        contents = [self.message, *(result.content for result in self.observation.results)]
        return [source for content in contents for source in _images(content)]


class _Agent(_Model):
    name: str


class _Trajectory(_Model):
    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.\d+$")]
    session_id: str = ""
    agent: _Agent
    steps: Annotated[list[_Step], Field(min_length=1)]
    extra: dict[str, Any] = {}


def from_atif(path: Path, *, settings: AgentSettings, first_picture: str = "") -> StoredTrajectory:
    """Return the demonstration in a document.

    Args:
        path: The document; its images are next to it.
        settings: The agent's settings, for documents of others.
        first_picture: The picture before the first step, for those that do not name it.

    Raises:
        AtifError: The document is invalid, an image is missing, or a step cannot be expressed.
    """
    try:
        document = _Trajectory.model_validate_json(_read(path, _MAX_DOCUMENT_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise AtifError(f"{path}: {where}: {problem_of(first)}") from error
    except (OSError, ValueError) as error:
        raise AtifError(f"{path}: cannot be read: {without_path(error)}") from error
    try:
        if document.agent.name == AGENT and "metadata" in document.extra:
            return _own(document, path.parent)
        return _played(document, path, settings, first_picture)
    # OverflowError: numbers that no float holds.
    except (MalformedRow, OverflowError, ValueError) as error:  # also settings without a possible size of pictures
        raise AtifError(f"{path}: {error}") from error


def _own(document: _Trajectory, folder: Path) -> StoredTrajectory:
    """Return our own trajectory, as it was before the export."""
    messages: list[dict[str, Any]] = []
    images: list[str] = []

    def add(role: str, content: _Content, extra: Mapping[str, Any]) -> None:
        for source in _images(content):
            data = base64.b64encode(_image(folder, source.path)).decode()
            images.append(f"data:{source.media_type};base64,{data}")
        parts = [] if isinstance(content, str) else [IMAGE_PLACEHOLDER if one.source else one.text for one in content]
        mask = {name: value for name, value in extra.items() if name == "step_loss_mask"}
        messages.append({"role": role, "content": content if isinstance(content, str) else "".join(parts), **mask})

    for step in document.steps:
        add("assistant" if step.source == "agent" else step.source, step.message, step.extra)
        for result in step.observation.results:
            add("user", result.content, {})
    fields = {name: document.extra.get(name) for name in ("task_id", "reward", "metadata")}
    return StoredTrajectory.from_row({**fields, "messages": messages, "images": images})


def _played(document: _Trajectory, path: Path, settings: AgentSettings, first_picture: str) -> StoredTrajectory:
    """Return another agent's trajectory in the prompts and the grammar of the settings. Raises: AtifError."""
    if settings.images_per_row or settings.text_only:
        raise AtifError("images_per_row and text_only: not supported here; remove them from --agent")
    reward = document.extra.get("reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise AtifError(f"extra.reward: {reward!r} is not a number")
    screen = _screen(_image(path.parent, first_picture), settings) if first_picture else None
    instruction, row, grammar = "", Row([]), settings.make_grammar()
    acting = [step for step in document.steps if step.source == "agent" and not step.is_copied_context]
    for step in document.steps:
        if step.source == "user" and not row.messages:
            instruction = "\n\n".join(filter(None, (instruction, _text(step.message))))
        actions = _actions(step, is_last=step is acting[-1]) if step in acting else ()
        if actions:
            if screen is None:
                raise AtifError(f"step {step.step_id}: no picture before it; name it by --first-picture")
            if row.messages:
                row.messages.append(observation_message(RESULT_OK, screen.seen))
            else:
                system = system_message(settings, screen.space.picture())
                row.messages += [system, task_message(instruction, screen.seen)]
            try:
                reply = screen.reply(actions, _text(step.message), grammar)
            except (PointOutsidePicture, UnsupportedAction) as error:
                raise AtifError(f"step {step.step_id}: {error}; another grammar (--agent) may have it") from error
            row.trained.add(len(row.messages))
            row.messages.append(Message("assistant", (reply,)))
        for source in [] if step.is_copied_context else step.images:
            before, screen = screen, _screen(_image(path.parent, source.path), settings)
            if before is not None and before.space != screen.space:
                raise AtifError(f"step {step.step_id}: a picture of another size; all must show the whole screen")
    if not 1 <= len(row.trained) <= settings.max_turns:
        raise AtifError(f"{len(row.trained)} steps act; it must be 1 to max_turns (--agent), {settings.max_turns}")
    metadata = {"instruction": instruction, "source": f"atif:{document.agent.name}", "grammar": settings.grammar}
    task_id = str(document.extra.get("task_id") or document.session_id or path.resolve().parent.name)
    return StoredTrajectory(
        task_id=task_id,
        messages=tuple(row.as_json()),
        images=row.images(),
        reward=float(reward),
        metadata={**metadata, "prompt_hash": prompt_hash(settings)},
    )


def _actions(step: _Step, *, is_last: bool) -> tuple[Action, ...]:
    """Return what a step of the agent does; nothing if it only looks. Raises: AtifError."""
    if not step.tool_calls:
        if not is_last:
            raise AtifError(f"step {step.step_id}: a reply without an action; only the last may have none")
        return (Done(),)
    try:
        actions = [action for call in step.tool_calls for action in actions_of(call.function_name, call.arguments)]
    except (BadAction, AtifError) as error:
        raise AtifError(f"step {step.step_id}: {error}") from error
    # computer-1 ends with two calls.
    ends = next((number for number, one in enumerate(actions, 1) if isinstance(one, Done | Fail)), len(actions))
    return tuple(actions[:ends])


class _Screen(NamedTuple):
    """A recorded picture as the agent would see it."""

    seen: ModelObservation
    space: CoordinateSpace
    """The space of points in the recorded picture."""

    def reply(self, actions: Sequence[Action], thought: str, grammar: Grammar) -> str:
        """Return actions as a reply, with text before it if the grammar then still reads the same actions.

        Raises:
            PointOutsidePicture, UnsupportedAction: They cannot be expressed.
        """
        for x, y in (point for action in actions for point in points_of(action)):
            if not (x < self.space.screen_width_px and y < self.space.screen_height_px):
                size = f"{self.space.screen_width_px}x{self.space.screen_height_px}"
                raise PointOutsidePicture(f"({x}, {y}) is outside its picture of {size}")
        reply = grammar.render([to_model_points(action, self.space) for action in actions])
        text = f"{thought}\n{reply}" if thought else reply
        picture = self.space.picture((0, 0))
        parsed = grammar.parse(text, picture)
        return text if parsed.parsed and parsed.actions == grammar.parse(reply, picture).actions else reply


def _require_size(image: Image.Image) -> None:
    if image.width * image.height > _MAX_PIXELS:
        raise ValueError(f"has {image.width} x {image.height} pixels; at most {_MAX_PIXELS} are read")


def _read(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises: OSError; ValueError: It is not a file, or has more bytes."""
    # Opening a pipe would otherwise wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a file")
        if status.st_size > max_bytes:
            raise ValueError(f"has {status.st_size} bytes; at most {max_bytes} are read")
        return file.read(max_bytes)


def _screen(data: bytes, settings: AgentSettings) -> _Screen:
    """Scale a picture down as the agent's view does, with sides that its image processor takes."""
    with Image.open(io.BytesIO(data)) as image:
        size = fit(*image.size, max_pixel_count=settings.image_max_pixels, multiple_px=settings.image_multiple_px)
        space = CoordinateSpace.of(settings.units, image_px=size, screen_px=image.size)
        shown = image.convert("RGB").resize(size)
    return _Screen(ModelObservation(image=shown, image_id="", tree=None, terminal=None, boxes_px=()), space)


def _images(content: _Content) -> list[_Source]:
    parts = [] if isinstance(content, str) else content
    return [part.source for part in parts if part.type == "image" and part.source is not None]


def _text(content: _Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _image(folder: Path, name: str) -> bytes:
    """Return an image of the document. Raises: AtifError: It is elsewhere, or is not an image."""
    path = (folder / name).resolve()
    if "://" in name or not path.is_relative_to(folder.resolve()):
        raise AtifError(f"image {name}: not in the document's directory; copy it there")
    try:
        data = _read(path, _MAX_IMAGE_BYTES)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _require_size(image)
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise AtifError(f"image {name}: cannot be read: {without_path(error)}") from error
    return data
