"""Which tasks are worth playing, by how often they were solved so far: groups without signal are paid for nothing."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from trainer.config import ExtensionError, InputError, called, is_own, named, require_call
from trainer.data.split import template_id

ALL: Final = "all"
#: Latest episodes of a template that are remembered.
_EPISODES = 32
#: Before so many episodes, a rate says little.
_LEAST_EPISODES = 8
#: What more episodes solve has little to gain. What none solved gives groups without signal.
_EASY = 0.8
#: How often a task is passed over before it is tried again: the policy changes. The first solution of what none solved
#: is found only by playing it.
_EASY_PASSED_OVER, _UNSOLVED_PASSED_OVER = 9, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHistory:
    """What is known of a task when it is drawn. Variants (`NAME?seed=N`) share the history of their template."""

    task_id: str
    solved: tuple[bool, ...] = ()
    """Whether each of its latest valid training episodes was solved, the newest last; at most 32."""
    passed_over: int = 0
    """How often it was drawn and not played since it was last played."""

    @property
    def solve_rate(self) -> float | None:
        """Share of solved episodes; None without any."""
        return fmean(self.solved) if self.solved else None


Curriculum = Callable[[TaskHistory], bool]
"""Returns whether a drawn task is played now."""


def every_task(history: TaskHistory) -> bool:  # noqa: ARG001 -- a Curriculum
    """Play all tasks."""
    return True


def by_solve_rate(history: TaskHistory) -> bool:
    """Play tasks that some of the latest episodes solved, but at most 80 %, and new ones.

    Of the others, each tenth draw of what is too easy is played, and each third of what none solved.

    DAPO (arXiv 2503.14476, section 3.2) drops groups that all or none of their members solved, after they are played.
    """
    rate = history.solve_rate
    if rate is None or len(history.solved) < _LEAST_EPISODES or 0 < rate <= _EASY:
        return True
    return history.passed_over >= (_EASY_PASSED_OVER if rate else _UNSOLVED_PASSED_OVER)


_CURRICULA: Mapping[str, Curriculum] = {ALL: every_task, "solve_rate": by_solve_rate}


def curriculum_of(name: str) -> Curriculum:
    """Return a curriculum by its name: `all`, `solve_rate` or an own one as `module:FUNCTION`. Raises: InputError."""
    function = named("curriculum", name, _CURRICULA)
    if not is_own(name):
        return function
    if isinstance(function, type):
        raise InputError(f"curriculum {name}: is a class; name a function, or an object that can be called")
    trials = (TaskHistory(task_id="trial"), TaskHistory(task_id="trial", solved=(True, False), passed_over=1))
    require_call("curriculum", name, function, trials[0])

    def checked(history: TaskHistory) -> bool:
        found = called("curriculum", name, function, history)
        if not isinstance(found, bool):
            raise ExtensionError(f"curriculum {name}: it returned a {type(found).__name__}; return True or False")
        return found

    for trial in trials:
        checked(trial)
    return checked


class TaskChoice:
    """Remembers which tasks were solved, and applies a curriculum. Thread-safe."""

    def __init__(self, curriculum: Curriculum) -> None:
        """Start without episodes."""
        self._curriculum = curriculum
        self._lock = threading.Lock()
        self._solved: dict[str, deque[bool]] = {}
        self._passed_over: dict[str, int] = {}

    def record(self, task_id: str, *, solved: bool) -> None:
        """Remember a valid training episode."""
        with self._lock:
            self._solved.setdefault(template_id(task_id), deque(maxlen=_EPISODES)).append(solved)

    def plays(self, task_id: str) -> bool:
        """Return whether a drawn task is played, and remember it. Raises: ExtensionError."""
        key = template_id(task_id)
        with self._lock:
            passed_over = self._passed_over.get(key, 0)
            history = TaskHistory(task_id=task_id, solved=tuple(self._solved.get(key, ())), passed_over=passed_over)
        is_played = self._curriculum(history)
        with self._lock:
            self._passed_over[key] = 0 if is_played else passed_over + 1
        return is_played

    def state(self) -> dict[str, list[bool]]:
        """Return what `resume` takes."""
        with self._lock:
            return {key: list(solved) for key, solved in self._solved.items()}

    def resume(self, state: Mapping[str, list[bool]]) -> None:
        """Replace what is remembered by a saved state."""
        with self._lock:
            self._solved = {key: deque(solved, maxlen=_EPISODES) for key, solved in state.items()}
            self._passed_over.clear()
