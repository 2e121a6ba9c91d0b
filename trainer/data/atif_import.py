"""Read documents of ATIF as demonstrations.

A document of our own is read back unchanged. One of another agent is played again: its actions, on its recorded
pictures, through the agent's own loop, so that prompts and replies are those of training. What cannot be expressed is
an `AtifError` that names the step; nothing is guessed.
"""

import base64
import hashlib
import io
import itertools
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from cuaenv.action_codec import BadAction
from cuaenv.client import Action, Done, Evaluation, Fail, Observation, Origin, State, StepResult, Task
from cuaenv.problems import problem_of, without_path
from trainer.agent.coordinates import points_of
from trainer.agent.settings import AgentSettings
from trainer.agent.types import ModelFailed
from trainer.data.atif import AGENT
from trainer.data.atif_actions import AtifError, actions_of
from trainer.data.oracles import Oracle, OracleStep
from trainer.data.record import OracleFailed, record
from trainer.replay.trajectory import IMAGE_PLACEHOLDER, MalformedRow, StoredTrajectory

_NOTHING: Final = Origin(template_digest="", overlay_parent="", first_frame_id="")


class _Model(BaseModel):
    """Later versions may add fields, so unknown ones are ignored."""


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
    content: _Content | None = None


class _Observation(_Model):
    results: list[_Result]


class _Step(_Model):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: _Content
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    is_copied_context: bool | None = None
    extra: dict[str, Any] | None = None

    @property
    def results(self) -> list[_Content]:
        """What the agent saw afterwards."""
        results = self.observation.results if self.observation else []
        return [result.content for result in results if result.content is not None]


class _Agent(_Model):
    name: str


class _Trajectory(_Model):
    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.\d+$")]
    session_id: str | None = None
    agent: _Agent
    steps: Annotated[list[_Step], Field(min_length=1)]
    extra: dict[str, Any] = Field(default_factory=dict)


async def from_atif(path: Path, *, settings: AgentSettings, first_picture: str = "") -> list[StoredTrajectory]:
    """Return the demonstration in a document: a trajectory per row, as `trainer.data.record.record` does.

    Args:
        path: The document; its images are next to it.
        settings: The agent's settings, for documents of others.
        first_picture: The picture before the first step, for those that do not name it.

    Raises:
        AtifError: The document is invalid, an image is missing, or a step cannot be expressed.
        OSError: The document cannot be read.
    """
    try:
        document = _Trajectory.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise AtifError(f"{path}: {where}: {problem_of(first)}") from error
    try:
        if document.agent.name == AGENT and "metadata" in document.extra:
            return [_own(document, path.parent)]
        return await _played(document, path, settings, first_picture)
    except (AtifError, MalformedRow, OracleFailed) as error:
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
        add("assistant" if step.source == "agent" else step.source, step.message, step.extra or {})
        for content in step.results:
            add("user", content, {})
    fields = {name: document.extra.get(name) for name in ("task_id", "reward", "metadata")}
    return StoredTrajectory.from_row({**fields, "messages": messages, "images": images})


@dataclass(slots=True)
class _Script:
    """What the agent did, and what it saw before each of its replies."""

    instruction: str = ""
    steps: list[OracleStep] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    screens: list[bytes] = field(default_factory=list)
    """One more than the steps."""

    def screen_px(self) -> tuple[int, int]:
        """Return the size (width, height) of the pictures. Raises: AtifError: They differ, or lack a point."""
        sizes = {_size(screen) for screen in self.screens}
        if len(sizes) > 1:
            raise AtifError(f"pictures of {len(sizes)} sizes; they must show the whole screen")
        (width, height) = sizes.pop()
        for number, actions in enumerate(self.steps, 1):
            for x, y in (point for action in actions for point in points_of(action)):
                if not (x < width and y < height):
                    raise AtifError(f"reply {number}: ({x}, {y}) is outside its picture of {width}x{height}")
        return width, height


async def _played(
    document: _Trajectory, path: Path, settings: AgentSettings, first_picture: str
) -> list[StoredTrajectory]:
    script = _script(document, path.parent, first_picture)
    screen_px = script.screen_px()
    if len(script.steps) > settings.max_turns:
        raise AtifError(
            f"{len(script.steps)} steps that act, but max_turns is {settings.max_turns}; raise it (--agent)"
        )
    task_id = str(document.extra.get("task_id") or document.session_id or path.resolve().parent.name)
    reward = document.extra.get("reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise AtifError(f"extra.reward: {reward!r} is not a number")
    recorded = await record(
        _Recordings(script, settings, score=float(reward)),
        Task(task_id=task_id, instruction=script.instruction, level=0, suite=""),
        Oracle(task_id=task_id, steps=tuple(script.steps), thoughts=tuple(script.thoughts)),
        settings=settings,
        screen_px=screen_px,
        patience_s=(),
        must_succeed=False,
    )
    source = f"atif:{document.agent.name}"
    return [replace(each, metadata={**each.metadata, "source": source}) for each in recorded]


def _script(document: _Trajectory, folder: Path, first_picture: str) -> _Script:
    script, screen = _Script(), _image(folder, first_picture) if first_picture else b""
    acting = [step for step in document.steps if step.source == "agent" and not step.is_copied_context]
    for step in document.steps:
        if step.source == "user" and not script.steps:
            script.instruction = "\n\n".join(filter(None, (script.instruction, _text(step.message))))
        if step in acting:
            try:
                called = [actions_of(call.function_name, call.arguments) for call in step.tool_calls or ()]
            except (BadAction, AtifError) as error:
                raise AtifError(f"step {step.step_id}: {error}") from error
            actions = tuple(itertools.chain.from_iterable(called))
            if not step.tool_calls:
                if step is not acting[-1]:
                    raise AtifError(f"step {step.step_id}: a reply without an action; only the last may have none")
                actions = (Done(),)
            if actions:
                if not screen:
                    raise AtifError(f"step {step.step_id}: no picture before it; name it by --first-picture")
                # computer-1 ends with two calls.
                ends = next((n for n, one in enumerate(actions, 1) if isinstance(one, Done | Fail)), len(actions))
                script.steps.append(actions[:ends])
                script.thoughts.append(_text(step.message))
                script.screens.append(screen)
        if not step.is_copied_context:
            for source in [one for content in (step.message, *step.results) for one in _images(content)]:
                screen = _image(folder, source.path)
    if not script.steps:
        raise AtifError("no step has an action")
    script.screens.append(screen)
    return script


def _images(content: _Content) -> list[_Source]:
    parts = [] if isinstance(content, str) else content
    return [part.source for part in parts if part.type == "image" and part.source is not None]


def _size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.size


def _text(content: _Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _image(folder: Path, name: str) -> bytes:
    """Return an image of the document. Raises: AtifError: It is elsewhere, or is not an image."""
    path = (folder / name).resolve()
    if "://" in name or not path.is_relative_to(folder.resolve()):
        raise AtifError(f"image {name}: not in the document's directory; copy it there")
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            image.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise AtifError(f"image {name}: cannot be read: {without_path(error)}") from error
    return data


class _Recordings:
    """Opens the recorded episode; a `trainer.agent.attempts.Environments`."""

    def __init__(self, script: _Script, settings: AgentSettings, *, score: float) -> None:
        self._script, self._settings, self._score = script, settings, score

    @asynccontextmanager
    async def reset(self, task: str, **_: Any) -> AsyncIterator["_Episode"]:
        yield _Episode(self._script, self._settings, task_id=task, score=self._score)


class _Episode:
    """Shows the recorded pictures, whatever is done; a `trainer.agent.loop.AgentEpisode`."""

    def __init__(self, script: _Script, settings: AgentSettings, *, task_id: str, score: float) -> None:
        self._script, self._score, self._count = script, score, 0
        self._seen = [_observation(data, settings) for data in script.screens]
        self.episode_id = self.task_id = task_id
        self.instruction = script.instruction
        self.observation = self._seen[0]
        self.origin = _NOTHING
        self.tools: tuple[str, ...] = ()

    async def step(self, *actions: Action, **_: Any) -> StepResult:
        if len(actions) != len(self._script.steps[self._count]):
            expected = len(self._script.steps[self._count])
            raise ModelFailed(f"reply {self._count + 1}: its {expected} actions need several replies in this grammar")
        self._count += 1
        is_last = self._count == len(self._script.steps)
        ending = next((action for action in actions if isinstance(action, Done | Fail)), None)
        reasons = {Done: "AGENT_DONE", Fail: "AGENT_FAIL"}
        self.observation = self._seen[self._count]
        return StepResult(
            observation=self.observation,
            action_errors=("",) * len(actions),
            state=State.TERMINATED if ending else State.TRUNCATED if is_last else State.ACTIVE,
            end_reason=reasons[type(ending)] if ending else "MAX_STEPS" if is_last else "",
            step_count=self._count,
            timings_ms={},
            screen_change=None,
            replayed=False,
        )

    async def evaluate(self, **_: Any) -> Evaluation:
        return Evaluation(score=self._score, checks=(), timings_ms={})


def _observation(data: bytes, settings: AgentSettings) -> Observation:
    """Return a picture as the agent's view of it: scaled down, with sides that its image processor takes."""
    with Image.open(io.BytesIO(data)) as image:
        screen_px, multiple = image.size, settings.image_multiple_px
        scale = min(1.0, math.sqrt(settings.image_max_pixels / (screen_px[0] * screen_px[1])))
        width_px, height_px = (max(multiple, int(side * scale) // multiple * multiple) for side in screen_px)
        png = io.BytesIO()
        image.convert("RGB").resize((width_px, height_px)).save(png, "PNG", compress_level=1)
    digest = hashlib.sha256(png.getvalue()).hexdigest()
    return Observation(
        frame_id=digest,
        image_id=digest,
        width_px=width_px,
        height_px=height_px,
        screen_width_px=screen_px[0],
        screen_height_px=screen_px[1],
        capture_time=datetime.fromtimestamp(0, UTC),
        data=png.getvalue(),
    )
