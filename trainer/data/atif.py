"""Trajectories as documents of Harbor's Agent Trajectory Interchange Format (ATIF).

A document is `trajectory.json` with the images next to it. Each action of a reply is a call of the function `computer`,
whose arguments are the JSON object of `cuaenv.action_codec`, with points in pixels of the picture that the model saw.
"""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from PIL import Image

from cuaenv.action_codec import FORMS, to_json
from cuaenv.agent_text.values import ParseError
from trainer.agent.coordinates import CoordinateSpace, points_of, to_screen_points
from trainer.agent.grammars import Grammar
from trainer.data.transcripts import is_trained, transcript_of
from trainer.files import write_atomically
from trainer.replay.trajectory import IMAGE_PLACEHOLDER, StoredTrajectory, image_bytes

VERSION: Final = "ATIF-v1.7"
#: The agent's name in our documents.
AGENT: Final = "envd-trainer"
FUNCTION: Final = "computer"
_ROLES: Final = {"system": "system", "user": "user", "tool": "user", "assistant": "agent"}
#: Units of points in a conversation without pictures.
_NO_PICTURE_PX: Final = (1000, 1000)


def write_atif(trajectory: StoredTrajectory, directory: Path, *, grammar: Grammar) -> int:
    """Write a trajectory: `trajectory.json`, and its images in `images/`; returns the number of images.

    A reply that the grammar does not parse has no calls, and a note.

    Raises:
        InputError: Images and placeholders do not match.
        OSError: A file cannot be written.
    """
    transcript = transcript_of(trajectory)
    writer = _Writer(grammar, iter(transcript.images))
    for message in transcript.messages:
        writer.add(message)
    function = {
        "name": FUNCTION,
        "description": "Acts on the desktop. Points are pixels of the last picture.",
        "parameters": {"type": "object", "oneOf": [form.schema() for form in FORMS.values()]},
    }
    document = {
        "schema_version": VERSION,
        "session_id": trajectory.base_id,
        "trajectory_id": trajectory.digest[:32],
        "agent": {
            "name": AGENT,
            "version": metadata.version("envd-trainer"),
            "tool_definitions": [{"type": "function", "function": function}],
            "extra": {"grammar": grammar.name},
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(writer.steps, 1)],
        "final_metrics": {"total_steps": len(writer.steps), "extra": {"reward": trajectory.reward}},
        "extra": {"task_id": trajectory.task_id, "reward": trajectory.reward, "metadata": dict(trajectory.metadata)},
    }
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for name, data in writer.images.items():
        write_atomically(directory / name, data)
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_atomically(directory / "trajectory.json", text.encode())
    return len(writer.images)


@dataclass(slots=True)
class _Writer:
    """The steps so far."""

    grammar: Grammar
    given: Iterator[str]
    steps: list[dict[str, Any]] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)
    picture_px: tuple[int, int] = _NO_PICTURE_PX
    pointer: tuple[int, int] | None = (0, 0)

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a message: as a step, or, after a reply, as what the agent saw next."""
        content = self._content(message["content"])
        last = self.steps[-1] if self.steps else {}
        if message["role"] in ("user", "tool") and last.get("source") == "agent" and "observation" not in last:
            calls = last.get("tool_calls") or [{}]
            source = {"source_call_id": calls[-1]["tool_call_id"]} if calls[-1] else {}
            last["observation"] = {"results": [{**source, "content": content}]}
            return
        step: dict[str, Any] = {"source": _ROLES[message["role"]], "message": content}
        if message["role"] == "assistant":
            calls, mistake = self._calls(message["content"])
            extra: dict[str, object] = {"mistake": mistake} if mistake else {}
            if not is_trained(message):
                extra["step_loss_mask"] = 0
            step |= {"tool_calls": calls} if calls else {}
            step |= {"extra": extra} if extra else {}
        self.steps.append(step)

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        """Return text as it is, or as parts if it has images."""
        first, *others = text.split(IMAGE_PLACEHOLDER)
        if not others:
            return text
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
        for rest in others:
            uri = next(self.given)
            media_type = uri.partition(";")[0].removeprefix("data:")
            path = f"images/{len(self.images) + 1:04}.{media_type.partition('/')[2]}"
            self.images[path] = image_bytes(uri)
            with Image.open(io.BytesIO(self.images[path])) as image:
                self.picture_px = image.size
            parts.append({"type": "image", "source": {"media_type": media_type, "path": path}})
            if rest:
                parts.append({"type": "text", "text": rest})
        return parts

    def _calls(self, reply: str) -> tuple[list[dict[str, Any]], str]:
        """Return the calls of a reply, and why it has none."""
        space = CoordinateSpace.of(self.grammar.coordinates, image_px=self.picture_px, screen_px=self.picture_px)
        parsed = self.grammar.parse(reply, space.picture(self.pointer))
        try:
            actions = [to_screen_points(action, space) for action in parsed.actions]
        except ParseError as mistake:
            return [], str(mistake)
        for action in parsed.actions:
            self.pointer = next(reversed(points_of(action)), self.pointer)
        calls = [
            {
                "tool_call_id": f"call_{len(self.steps) + 1}_{number}",
                "function_name": FUNCTION,
                "arguments": to_json(one),
            }
            for number, one in enumerate(actions, 1)
        ]
        return calls, parsed.error
