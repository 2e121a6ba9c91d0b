"""The hybrid reward compared with a second implementation of its formula, and with measurements of the original."""

import itertools
import random
from dataclasses import dataclass

import pytest

from trainer.config import InputError
from trainer.rewards.facts import ActionFacts, EpisodeFacts, TurnFacts
from trainer.rewards.recipes import recipe

#: An example of an own reward.
SLIME_OSWORLD = "docs.examples.own.slime_osworld:SlimeOSWorld"

#: Name in the model's grammar, name in Slime-OSWorld, whether it has a point, and its text in quotation marks.
FORMS = [
    ("left_click", "click", True, None),
    ("right_click", "rightclick", True, None),
    ("double_click", "doubleclick", True, None),
    ("type", "write", False, "Save As"),
    ("type", "write", False, 'say "hi"'),
    ("key", "press", False, "enter"),
    ("scroll", "scroll", False, None),
    ("left_click_drag", "dragto", False, None),
    ("mouse_move", "moveto", False, None),
    ("wait", "WAIT", False, None),
    ("", "DONE", False, None),
    ("", "FAIL", False, None),
    ("", "unknown", False, None),
]
TREES = [None, "", "button save as", "Button Save As, text ENTER " * 3]


@dataclass(frozen=True)
class Signal:
    form: tuple[str, str, bool, str | None]
    place: tuple[int, int]
    parsed: bool
    executed: bool
    fallback: bool
    diff: float
    before: str | None
    after: str | None
    terminals: tuple[str | None, str | None]


TERMINALS = [(None, None), ("$", "$"), ("$", "$ ls"), (None, "$")]


def signal_of(chance: random.Random) -> Signal:
    return Signal(
        form=chance.choice(FORMS),
        place=chance.choice([(1, 2), (1, 3), (640, 360)]),
        parsed=chance.random() < 0.7,
        executed=chance.random() < 0.7,
        fallback=chance.random() < 0.3,
        diff=chance.random(),
        before=chance.choice(TREES),
        after=chance.choice(TREES),
        terminals=chance.choice(TERMINALS),
    )


def turn_of(signal: Signal) -> TurnFacts:
    kind, name, has_place, quoted = signal.form
    action = ActionFacts(
        kind=kind,
        point_px=signal.place if has_place or kind == "left_click_drag" else None,
        text=quoted if kind == "type" else None,
        keys=("enter",) if kind == "key" else (),
        executed=signal.executed,
    )
    return TurnFacts(
        text="",
        parsed=signal.parsed,
        fallback="bare_json" if signal.fallback else None,
        actions=(action,) if kind else (),
        done=name == "DONE",
        failed=name == "FAIL",
        grey_difference=signal.diff,
        tree_before=signal.before,
        tree_after=signal.after,
        terminal_before=signal.terminals[0],
        terminal_after=signal.terminals[1],
    )


def by_the_formula(
    score: float, steps: list[Signal], *, weights: tuple[float, ...], alpha: float, span: tuple[int, int], limit: int
) -> float:
    """The formula, implemented a second time from its description."""
    n = len(steps)
    names = [step.form[1] for step in steps]
    total = [0.0] * 8
    for step in steps:
        kind, name, _, quoted = step.form
        marks = "say \\" if quoted == 'say "hi"' else quoted
        before, after = step.before or "", step.after or ""
        total[0] += step.parsed
        total[1] += name in ("DONE", "FAIL") or (kind != "" and step.executed)
        total[2] += bool(step.parsed and marks and marks.lower() in before.lower() and before)
        total[5] += step.diff
        total[6] += min(1, abs(len(after) - len(before)) / max(1, len(before))) if before else 0
        total[7] += (step.terminals[0] or "") != (step.terminals[1] or "")
    means = [value / n if n else 0.0 for value in total]
    low, high = span
    fit = 1.0 if low <= n <= high else n / low if n < low else max(0.5, high / n)
    modalities = {m for m in ("click", "type", "key", "scroll", "drag", "wait") for name in names if m in name.lower()}
    if n:
        means[3] = 0.4 * min(1, len(set(names)) / 3) + 0.4 * fit + 0.2 * min(1, len(modalities) / 2)
    means[4] = max(0, (limit - n) / limit) if n else 1.0
    reward = score + alpha * sum(weight * value for weight, value in zip(weights, means, strict=True))
    if n >= 2:
        places = [step.place if step.form[2] else None for step in steps]
        both = list(zip(names, places, strict=True))
        reward -= min(0.30, 0.40 * sum(a == b for a, b in itertools.pairwise(both)) / n)
        reward -= min(0.15, 0.30 * names.count("unknown") / n)
    if n:
        reward -= min(0.5, 0.5 * sum(step.fallback for step in steps) / n)
        reward -= min(0.3, 0.3 * names.count("WAIT") / n)
    return max(0.0, min(1.0, reward))


CODE = (0.10, 0.15, 0.30, 0.25, 0.05, 0.05, 0.05, 0.05)
BLIND = (0.10, 0.15, 0.0, 0.25, 0.05, 0.05, 0.0, 0.05)
VARIANTS: list[tuple[dict[str, object], tuple[float, ...], float, tuple[int, int]]] = [
    ({}, CODE, 0.3, (5, 12)),
    ({"weights": "config_file"}, (0.10, 0.15, 0.10, 0.15, 0.05, 0.05, 0.05, 0.05), 0.3, (2, 5)),
    ({"complexity": "high", "alpha": 0.7}, CODE, 0.7, (10, 25)),
    ({"a11y_mode": "off"}, BLIND, 0.3, (5, 12)),
    ({"a11y_mode": "every_n"}, BLIND, 0.3, (5, 12)),
]


@pytest.mark.parametrize(("options", "weights", "alpha", "span"), VARIANTS)
def test_a_thousand_episodes_agree_with_the_second_implementation(
    options: dict[str, object], weights: tuple[float, ...], alpha: float, span: tuple[int, int]
) -> None:
    chance = random.Random(7)
    reward = recipe(SLIME_OSWORLD, **options)
    totals = set()
    for _ in range(1000):
        steps = [signal_of(chance) for _ in range(chance.randrange(27))]
        score, limit = chance.choice([0.0, chance.random(), 1.0]), chance.choice([8, 15])
        facts = EpisodeFacts(task_id="t", task_score=score, turns=tuple(map(turn_of, steps)), max_turns=limit)
        breakdown = reward(facts)
        expected = by_the_formula(score, steps, weights=weights, alpha=alpha, span=span, limit=limit)
        assert abs(breakdown.total - expected) < 1e-9
        assert abs(sum(breakdown.parts.values()) - breakdown.total) < 1e-9
        totals.add(breakdown.total)
    assert len(totals) > 500, "most are neither 0 nor 1, where a wrong number would not show"


def episode(*turns: TurnFacts, task_score: float = 0.0) -> EpisodeFacts:
    return EpisodeFacts(task_id="t", task_score=task_score, turns=turns, max_turns=15)


def act(kind: str, *, point: tuple[int, int] | None = None) -> TurnFacts:
    return TurnFacts(text="", parsed=True, actions=(ActionFacts(kind=kind, point_px=point),))


def test_the_measurements_of_the_original_are_reproduced() -> None:
    reward = recipe(SLIME_OSWORLD)
    assert reward(episode(*[act("wait")] * 8)).total == 0.0
    assert reward(episode(TurnFacts(text="", parsed=True, done=True))).total == pytest.approx(0.105)


def test_the_complexity_comes_from_the_tasks_metadata() -> None:
    turns = (act("left_click", point=(1, 1)), act("left_click", point=(200, 1)))
    plain = EpisodeFacts(task_id="t", task_score=0.0, turns=turns, max_turns=15)
    declared = EpisodeFacts(task_id="t", task_score=0.0, turns=turns, max_turns=15, metadata={"complexity": "low"})
    reward = recipe(SLIME_OSWORLD)
    assert reward(declared).parts["tool"] - reward(plain).parts["tool"] == pytest.approx(0.3 * 0.25 * 0.4 * (1 - 2 / 5))
    assert recipe(SLIME_OSWORLD, complexity="medium")(declared) == reward(plain)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"weights": "mine"}, "weights is 'mine'; it must be 'code' or 'config_file'"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": "0.3"}, "alpha is '0.3'; it must be a valid number"),
        ({"complexity": "hard"}, "it must be 'low', 'medium' or 'high'"),
        ({"a11y_mode": "sometimes"}, "it must be 'full', 'off' or 'every_n'"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"beta": 1}, "SlimeOSWorld.beta: unknown key; .*: weights, alpha, complexity, max_steps, a11y_mode"),
    ],
)
def test_an_invalid_option_is_refused_by_name(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        recipe(SLIME_OSWORLD, **options)
