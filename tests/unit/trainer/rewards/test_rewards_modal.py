"""The historic recipes of the Windows example, compared with numbers computed by hand from their sources."""

import pytest

from trainer.config import InputError
from trainer.rewards.facts import EpisodeFacts, TurnFacts
from trainer.rewards.recipes import recipe

COMPLETE = [
    "<action>sendkey meta_l-r</action>",
    "<action>type notepad</action>",
    "<action>sendkey ret</action>",
    "<action>type Hello</action>",
    "<action>sendkey ctrl-s</action>",
    "<done/>",
]
SLOPPY = [
    "Let me look. <action type>",
    "<action>click 3 4</action>",
    "<action>sendkey q x</action><action>wait 1</action>",
]
PROSE = ["I will now open the editor."]


def reward(version: str, texts: list[str], task_score: float = 0.0) -> float:
    turns = tuple(TurnFacts(text=text, parsed=True) for text in texts)
    facts = EpisodeFacts(task_id="t", task_score=task_score, turns=turns, max_turns=10)
    breakdown = recipe("docs.examples.own.modal_windows:Modal", version=version)(facts)
    assert sum(breakdown.parts.values()) == pytest.approx(breakdown.total, abs=1e-9)
    assert breakdown.task_score == task_score
    return breakdown.total


# COMPLETE under v6: five actions priced 1 + .5 + .5 + .5 + .8, two verbs, "done": .6 + min(2, 3.3) + .5 + .3 = 3.4.
# SLOPPY under v6: a malformed tag (.1), two actions (.4) priced 0 + .2: 0.7.
@pytest.mark.parametrize(
    ("version", "complete", "sloppy", "prose"),
    [
        ("v1", 0.0, 0.0, 0.0),
        ("v2", 0.1 + 0.05 + 0.05, 0.04 + 0.05, 0.0),
        ("v3", 0.15 + 0.1 + 0.1, 0.1 + 0.1, 0.0),
        ("v4", 0.35, 0.03 + 0.1 + 0.1, 0.0),
        ("v5", 1.0 + 0.5 + 0.5 + 0.5, 0.2 + 0.6 + 0.5, 0.0),
        ("v6", 3.4, 0.7, 0.0),
        ("v7", 3.4, 0.7, 0.0),
        ("v8", 3.4, 0.7, 0.0),
        ("v9", 3.4, 0.7, 0.0),
        # Qualities: mean .3, a text, a key, done, one action a turn; and (.05 + .1 + .2) / 3.
        ("v10", 3 * (3.4 + 0.5 * 0.8), 3 * (0.7 + 0.5 * 0.35 / 3), 0.0),
        ("v11", 11.4 + 0.9 * (1 - 155 / 4096), 2.275 + 0.9 * (1 - 103 / 4096), 0.9 * (1 - 27 / 4096)),
        # Five of six turns are great: .3 + .7 * 5/6 + .2 is above 1. One of three: .3 + .7/3.
        ("v12a", 3 * (3.4 + 1.0), 3 * (0.7 + 0.3 + 0.7 / 3), 0.0),
        ("v12b", 3 * (3.4 + 1.0), 3 * (0.7 + (0.5 + 0.5) / 3), 0.0),
    ],
)
def test_each_version_agrees_with_its_source(version: str, complete: float, sloppy: float, prose: float) -> None:
    assert reward(version, COMPLETE) == pytest.approx(complete, abs=1e-9)
    assert reward(version, SLOPPY) == pytest.approx(sloppy, abs=1e-9)
    assert reward(version, PROSE) == pytest.approx(prose, abs=1e-9)


@pytest.mark.parametrize(
    ("version", "unknown_verb", "done_alone", "nothing"),
    [
        # The environment gives .2 and .3; the format part gives more.
        ("v7", 0.5, 0.3, 0.0),
        ("v8", 0.6, 0.5 + 0.1, 0.0),
        ("v9", 0.5, 0.3 + 0.2, 0.0),
    ],
)
def test_the_format_part_applies_if_the_environment_gives_less(
    version: str, unknown_verb: float, done_alone: float, nothing: float
) -> None:
    assert reward(version, ["<action>click 3</action>"]) == pytest.approx(unknown_verb)
    assert reward(version, ["<done />"]) == pytest.approx(done_alone)
    assert reward(version, []) == nothing


def test_from_half_the_task_score_the_environment_has_no_shaping() -> None:
    texts = ["<action>wait 1</action>"] * 5
    worth = {version: reward(version, texts, 0.5) for version in ("v1", "v2", "v4", "v5", "v6", "v9")}
    assert worth == {"v1": 0.5, "v2": 0.5, "v4": 0.5, "v5": 2.5, "v6": 2.5, "v9": 2.5}
    assert reward("v12b", texts, 0.5) == pytest.approx(3 * (2.5 + 1.0))
    assert reward("v12b", texts, 0.49) == pytest.approx(3 * (0.6 + 1.0 + 1.0))


def test_a_perfect_file_is_worth_18_and_a_wrong_one_less_than_none() -> None:
    """Both were measured on the original: 18, and 9.6 for the wrong case where shaping without a file gets 13.2."""
    assert reward("v12b", COMPLETE, 1.0) == pytest.approx(18.0)
    assert reward("v12b", ["<action>wait 1</action>", "a", "<done/>"], 0.5) < reward("v12b", COMPLETE) == 13.2


@pytest.mark.parametrize("version", ["v12c", "v13"])
def test_an_unknown_version_is_refused_with_the_list(version: str) -> None:
    with pytest.raises(InputError, match=f"version is {version}; choose one of v1, v2"):
        recipe("docs.examples.own.modal_windows:Modal", version=version)
