"""The hybrid reward of Slime-OSWorld, exact to every digit; a record of it, not a recommendation (docs/rewards.md).

    reward: {recipe: "slime_osworld:SlimeOSWorld", weights: config_file}


    partial = sum of weight * signal, each signal a mean over the n turns or as below
    efficiency = max(0, (max_steps - n) / max_steps), 1 without turns
    tool       = 0.4 min(1, types / 3) + 0.4 complexity + 0.2 min(1, modalities / 2)
    complexity = 1 with n in the range, n / minimum below it, max(0.5, maximum / n) above it
    penalties  = repeated min(.30, .40 r/n), unknown min(.15, .30 u/n), both only with two or more turns;
                 fallback min(.5, .5 f/n); wait min(.3, .3 w/n)
    total      = clamp(task + alpha * partial - penalties, 0, 1)

Source: Slime-OSWorld, commits 8ff25d9 and 8ba30a4 (its reward and environment modules), which name actions as pyautogui
does, in lower case. There a turn has one action; here the first of several actions represents the turn.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer.config import STRICT
from trainer.rewards.facts import ActionFacts, Breakdown, EpisodeFacts, TurnFacts, capped

_CODE_WEIGHTS = {
    "parsed": 0.10,
    "executed": 0.15,
    "grounded": 0.30,
    "tool": 0.25,
    "efficiency": 0.05,
    "screen_diff": 0.05,
    "a11y_delta": 0.05,
    "terminal_changed": 0.05,
}
_WEIGHTS = {"code": _CODE_WEIGHTS, "config_file": {**_CODE_WEIGHTS, "grounded": 0.10, "tool": 0.15}}
_COMPLEXITY_BY_WEIGHTS = {"code": "medium", "config_file": "low"}
_TURN_RANGES = {"low": (2, 5), "medium": (5, 12), "high": (10, 25)}
_MODALITIES = ("click", "type", "key", "scroll", "drag", "wait")

_NAMES = {
    "left_click": "click",
    "right_click": "rightclick",
    "double_click": "doubleclick",
    "triple_click": "tripleclick",
    "type": "write",
    "typeline": "write",
    "left_click_drag": "dragto",
    "mouse_move": "moveto",
}
_PLACED = ("click", "rightclick", "doubleclick")
_QUOTED = re.compile(r"""["']([^"']+)["']""")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeOSWorld:
    """The hybrid reward."""

    __pydantic_config__: ClassVar = STRICT

    weights: Literal["code", "config_file"] = "code"
    """The weights in its code (sum 1.0), or those in its config file (grounded .10, tool .15; sum .70)."""
    alpha: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.3
    """Weight of the partial score."""
    complexity: Literal["low", "medium", "high"] | None = None
    """Expected number of turns. None: from the task's metadata, else medium, or low with `config_file`."""
    max_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Step limit for the efficiency; None for the episode's own limit."""
    a11y_mode: Literal["full", "off", "every_n"] = "full"
    """Values other than "full" remove grounding and tree from the sum."""

    def __call__(self, facts: EpisodeFacts) -> Breakdown:
        steps = [_step(turn) for turn in facts.turns]
        signals = _signals(steps, complexity=self._complexity(facts), max_steps=self.max_steps or facts.max_turns)
        weights: Mapping[str, float] = _WEIGHTS[self.weights]
        if self.a11y_mode != "full":
            weights = {**weights, "grounded": 0.0, "a11y_delta": 0.0}
        parts = {"task": facts.task_score}
        parts |= {name: self.alpha * weight * signals[name] for name, weight in weights.items()}
        parts |= {name: -penalty for name, penalty in _penalties(steps).items()}
        return capped("slime_osworld", facts.task_score, parts, low=0.0, high=1.0)

    def _complexity(self, facts: EpisodeFacts) -> str:
        named = self.complexity or facts.metadata.get("complexity")
        return named if isinstance(named, str) and named in _TURN_RANGES else _COMPLEXITY_BY_WEIGHTS[self.weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A turn as Slime-OSWorld records it."""

    kind: str
    place: tuple[int, int] | None
    parsed: bool
    executed: bool
    fallback: bool
    grounded: bool
    screen_diff: float
    a11y_delta: float
    terminal_changed: bool


def _step(turn: TurnFacts) -> _Step:
    action = turn.actions[0] if turn.actions else None
    kind = _kind(turn, action)
    before, after = turn.tree_before or "", turn.tree_after or ""
    # Slime-OSWorld's parser names an element only after strict parsing.
    quoted = _first_quoted(kind, action) if action is not None and turn.parsed else None
    return _Step(
        kind=kind,
        place=action.point_px if action is not None and kind.lower() in _PLACED else None,
        parsed=turn.parsed,
        executed=kind in ("DONE", "FAIL") or (bool(turn.actions) and all(each.executed for each in turn.actions)),
        fallback=turn.fallback is not None,
        grounded=quoted is not None and quoted.lower() in before.lower(),
        screen_diff=turn.grey_difference or 0.0,
        a11y_delta=min(1.0, abs(len(after) - len(before)) / len(before)) if before else 0.0,
        terminal_changed=(turn.terminal_before or "") != (turn.terminal_after or ""),
    )


def _kind(turn: TurnFacts, action: ActionFacts | None) -> str:
    name = action.kind.lower() if action is not None else ""
    if name in ("", "terminate", "answer", "done", "fail"):
        return "DONE" if turn.done else "FAIL" if turn.failed else "unknown"
    if name == "wait":
        return "WAIT"
    if action is not None and name in ("key", "sendkey"):
        return "press" if len(action.keys) <= 1 else "hotkey"
    return _NAMES.get(name, name)


def _first_quoted(kind: str, action: ActionFacts) -> str | None:
    """Return the text between the first two quotation marks of the call, as Slime-OSWorld's parser finds it."""
    if kind in ("write", "typewrite"):
        written = (action.text or "").replace("\\", "\\\\").replace('"', '\\"')
    elif kind in ("press", "hotkey"):
        written = action.keys[0] if action.keys else ""
    else:
        return None
    match = _QUOTED.search(f'"{written}"')
    return match.group(1) if match is not None else None


def _signals(steps: Sequence[_Step], *, complexity: str, max_steps: int) -> dict[str, float]:
    count = len(steps)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count if count else 0.0

    return {
        "parsed": mean([step.parsed for step in steps]),
        "executed": mean([step.executed for step in steps]),
        "grounded": mean([step.grounded for step in steps]),
        "tool": _tool_score([step.kind for step in steps], complexity=complexity),
        "efficiency": max(0.0, (max_steps - count) / max_steps) if count else 1.0,
        "screen_diff": mean([step.screen_diff for step in steps]),
        "a11y_delta": mean([step.a11y_delta for step in steps]),
        "terminal_changed": mean([step.terminal_changed for step in steps]),
    }


def _tool_score(kinds: Sequence[str], *, complexity: str) -> float:
    if not kinds:
        return 0.0
    count = len(kinds)
    low, high = _TURN_RANGES[complexity]
    fitting = 1.0 if low <= count <= high else count / low if count < low else max(0.5, high / count)
    modalities = {name for kind in kinds for name in _MODALITIES if name in kind.lower()}
    return 0.4 * min(1.0, len(set(kinds)) / 3) + 0.4 * fitting + 0.2 * min(1.0, len(modalities) / 2)


def _penalties(steps: Sequence[_Step]) -> dict[str, float]:
    count = len(steps)
    if not count:
        return {}
    pairs = pairwise(steps)
    # Known fault of the original: two turns without a point, such as two typed texts, count as a repetition.
    repeated = sum(1 for one, next_one in pairs if (one.kind, one.place) == (next_one.kind, next_one.place))
    unknown = sum(1 for step in steps if step.kind == "unknown")
    return {
        "repeated": min(0.30, 0.40 * repeated / count),
        "unknown": min(0.15, 0.30 * unknown / count) if count > 1 else 0.0,
        "fallback": min(0.5, 0.5 * sum(step.fallback for step in steps) / count),
        "wait": min(0.3, 0.3 * sum(1 for step in steps if step.kind == "WAIT") / count),
    }
