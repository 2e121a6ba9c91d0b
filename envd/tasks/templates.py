"""Task templates: one template yields thousands of tasks with known answers.

A template samples its parameters (names, numbers, texts) and builds a task from them, with the matching checker and
oracle. `desktop/delete-line` is a template's plain variant, `desktop/delete-line?seed=17` another: equal ids are equal
tasks, on every host.

A template with all its variants is either for training or held out. Its name alone decides, so that templates added
later do not move others.
"""

import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, TypeVar

from envd.base.errors import TaskNotFound
from envd.tasks.model import Split, Task

T = TypeVar("T")

#: The fields of a `Task` except id, level, domain and split, as in a task file.
Entry = Mapping[str, object]

MAX_SEED: Final = 2**31 - 1
#: Chosen so that both splits have every level and every large domain of the built-in suite. Must never change.
_SPLIT_SEED: Final = "envd-160"
_HELD_OUT_SHARE: Final = 0.25
_VARIANT_ID = re.compile(r"(?P<template>[^?]*)\?seed=(?P<seed>0|[1-9][0-9]{0,9})")


class Sampler:
    """Samples a template's parameters. Without a seed it always returns the first option."""

    def __init__(self, key: str, seed: int | None) -> None:
        """Equal keys and seeds yield equal samples."""
        # Python hashes text seeds with SHA-512, so the samples do not depend on its version or hash seed.
        self._rng = None if seed is None else random.Random(f"{key}?{seed}")  # noqa: S311 - not a secret
        self.option_count = 1
        """Number of different results of all calls so far."""

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        self.option_count *= len(options)
        return options[0] if self._rng is None else self._rng.choice(options)

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Return `count` different options, in random order."""
        self.option_count *= math.perm(len(options), count)
        return list(options[:count]) if self._rng is None else self._rng.sample(options, count)

    def randint(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return self.choice(range(low, high + 1))


@dataclass(frozen=True, kw_only=True)
class Template:
    """A function that builds the variants of a task."""

    task_id: str
    """`{suite}/{name}`."""
    level: int
    domain: str
    build: Callable[[Sampler], Entry] = field(repr=False)
    """Builds a task. Must depend on nothing but the sampler."""
    finish: Callable[[Entry], Entry] = field(default=dict, repr=False)
    """Adds what all tasks of its suite have."""

    @cached_property
    def variant_count(self) -> int:
        """Number of different samples over all seeds; some may yield equal tasks."""
        rng = Sampler(self.task_id, None)
        self.build(rng)
        return min(rng.option_count, MAX_SEED + 1)

    def variant(self, seed: int | None) -> Task:
        """Return a variant; without a seed, the plain one. Raises: ValueError: The template is invalid."""
        entry = self.finish(self.build(Sampler(self.task_id, seed)))
        task_id = self.task_id if seed is None else f"{self.task_id}?seed={seed}"
        task = Task.model_validate({**entry, "task_id": self.task_id, "level": self.level, "domain": self.domain})
        # Not validated: ids with a seed are not allowed in task files.
        return task.model_copy(update={"task_id": task_id})


class Templates:
    """The templates of a suite, by id."""

    def __init__(self, suite: str, finish: Callable[[Entry], Entry] = dict) -> None:
        """Each task of the suite is as `finish` returns it."""
        self._suite = suite
        self._finish = finish
        self.by_id: dict[str, Template] = {}

    def add(
        self, level: int, domain: str, *, suite: str = ""
    ) -> Callable[[Callable[[Sampler], Entry]], Callable[[Sampler], Entry]]:
        """Register the decorated function as a template; its name becomes the template's, in this suite or another."""

        def register(build: Callable[[Sampler], Entry]) -> Callable[[Sampler], Entry]:
            task_id = f"{suite or self._suite}/{build.__name__.replace('_', '-')}"
            if task_id in self.by_id:
                raise ValueError(f"template {task_id}: duplicate name")
            self.by_id[task_id] = Template(
                task_id=task_id, level=level, domain=domain, build=build, finish=self._finish
            )
            return build

        return register

    @lru_cache(maxsize=4096)  # noqa: B019 - one suite lives as long as the daemon
    def variant(self, task_id: str) -> Task | None:
        """Return the task with this id; None if it belongs to no template.

        Raises:
            TaskNotFound: The seed is malformed.
        """
        if (template := self.by_id.get(task_id)) is not None:
            return template.variant(None)
        template = self.by_id.get(template_id_of(task_id))
        if template is None:
            return None
        match = _VARIANT_ID.fullmatch(task_id)
        if match is None or int(match["seed"]) > MAX_SEED:
            use = f"{template.task_id}?seed=N, N from 0 to {MAX_SEED}"
            raise TaskNotFound(f"task {task_id!r} not found; use {use}")
        return template.variant(int(match["seed"]))


def template_id_of(task_id: str) -> str:
    """Return the id of a task's template; the task's own id if it has none."""
    return task_id.partition("?")[0]


def split_of(task: Task) -> Split:
    """Return whether a task is for training or held out: its own `split`, otherwise by its template's id."""
    if task.split is not None:
        return task.split
    return split_of_id(template_id_of(task.task_id))


def split_of_id(template_id: str) -> Split:
    """Return whether the tasks of a template are for training or held out."""
    digest = hashlib.sha256(f"{_SPLIT_SEED}:{template_id}".encode()).digest()
    return "held_out" if int.from_bytes(digest[:8]) < _HELD_OUT_SHARE * 2**64 else "train"
