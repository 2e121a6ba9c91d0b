"""Field types of task data: guest paths, patterns, encodings, commands, limits, windows.

Each type validates itself, so that its users can rely on it.
"""

import base64
import binascii
import codecs
import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

#: Pseudo-encoding: decodes by the byte order mark, if there is one, and removes the mark.
BOM = "bom"


@dataclass(frozen=True, slots=True, order=True)
class AssetRef:
    """A file that a task needs."""

    url: str
    sha256: str = ""
    """Empty if the task gives none."""


#: Most perturbations of one reset.
MAX_PERTURBATIONS: Final = 8


class Model(BaseModel):
    """Base of all task data: immutable, without unknown fields."""

    # Judges validate nothing, and a union builds the schemas of its members by itself.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


PerturbationKind = Literal[
    "background", "extra_window", "font_scale", "late_program", "low_battery", "notification", "theme", "update",
    "window_placement",
]  # fmt: skip


class TaskPerturb(Model):
    """What each reset of a task draws by itself, unless the reset names perturbations of its own."""

    kinds: tuple[PerturbationKind, ...] = get_args(PerturbationKind)
    """Kinds to draw from."""
    count: int = Field(default=1, ge=1)
    """How many kinds to draw."""

    @model_validator(mode="after")
    def _has_enough_kinds(self) -> Self:
        if self.count > min(MAX_PERTURBATIONS, len(set(self.kinds))):
            raise ValueError(f"count: {self.count} is not 1 to {min(MAX_PERTURBATIONS, len(set(self.kinds)))}")
        return self


def task_name(foreign_id: str) -> str:
    """Return an id of a foreign suite as the second part of a task's id."""
    return re.sub(r"[^a-z0-9_-]+", "-", foreign_id.lower()).strip("-_") or "unnamed"


def checked_path(path: str) -> str:
    """Return a guest path. Raises: ValueError: It is not absolute, or leads out of the root."""
    is_windows = re.match(r"[A-Za-z]:[\\/]", path) is not None
    if not (path.startswith("/") or is_windows):
        raise ValueError(f"{path!r} is not absolute; write a path such as /home/user/notes.txt")
    parts = re.split(r"[\\/]" if is_windows else "/", path)
    if "\0" in path or ".." in parts or not any(parts[1:]):
        raise ValueError(f"{path!r} is not a path below the root without '..'")
    return path


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


def _checked_encoding(name: str) -> str:
    if name != BOM:
        try:
            codecs.lookup(name)
        except LookupError as error:
            raise ValueError(f"unknown encoding {name!r}") from error
    return name


def _checked_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64: {error}") from error
    return text


GuestPath = Annotated[str, AfterValidator(checked_path)]
Regex = Annotated[str, AfterValidator(_checked_regex)]
Base64 = Annotated[str, AfterValidator(_checked_base64)]
Encoding = Annotated[str, AfterValidator(_checked_encoding)]
Encodings = Annotated[tuple[Encoding, ...], Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Argv = Annotated[tuple[str, ...], Field(min_length=1)]
Timeout = Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)]


class WindowMatch(Model):
    """Selects windows by title and class. All given patterns must match, anywhere in the text."""

    title: Regex = ""
    """Regular expression, searched for in the title."""
    wm_class: Regex = Field(default="", alias="class")
    """Regular expression, searched for in `instance.Class`."""

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.title and not self.wm_class:
            raise ValueError("give title, class or both")
        return self

    def __str__(self) -> str:
        given = (("title", self.title), ("class", self.wm_class))
        return " and ".join(f"{name} /{pattern}/" for name, pattern in given if pattern)
