"""Properties of all recipes, and of `shaped`: success first, and no reward without work."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import InputError
from trainer.rewards.facts import ActionFacts, Breakdown, EpisodeFacts, TurnFacts
from trainer.rewards.groups import group_advantages, has_signal
from trainer.rewards.recipes import NAMES, Recipe, recipe
from trainer.rewards.shaped import hits_a_box, same_action

BOX = (100, 100, 50, 20)

points = st.tuples(st.integers(0, 200), st.integers(0, 200))
actions = st.builds(
    ActionFacts,
    kind=st.sampled_from(["left_click", "type", "key", "wait", "scroll", "terminate"]),
    point_px=st.none() | points,
    text=st.none() | st.sampled_from(["a", "<action>type a</action>"]),
    keys=st.sampled_from([(), ("enter",), ("ctrl", "s")]),
    executed=st.booleans(),
)
turns = st.builds(
    TurnFacts,
    text=st.sampled_from(["", "prose", "<action>type a</action>", "<action>sendkey ret</action>", "<done/>"]),
    parsed=st.booleans(),
    fallback=st.none() | st.just("bare_json"),
    actions=st.lists(actions, max_size=3).map(tuple),
    errors=st.sampled_from([(), ("no such key",)]),
    done=st.booleans(),
    failed=st.booleans(),
    changed_fraction=st.none() | st.floats(0, 1),
    grey_difference=st.none() | st.floats(0, 1),
    tree_before=st.sampled_from([None, "", "a button"]),
    tree_after=st.sampled_from([None, "", "a button", "a window"]),
    boxes_before=st.sampled_from([(), (BOX,)]),
    terminal_before=st.sampled_from([None, "$"]),
    terminal_after=st.sampled_from([None, "$", "$ ls"]),
)
scores = st.floats(0, 1) | st.sampled_from([0.0, 0.2, 0.5, 1.0, math.nextafter(0.5, 0), math.nextafter(1, 0), 5e-324])


def episodes(score: st.SearchStrategy[float]) -> st.SearchStrategy[EpisodeFacts]:
    return st.builds(
        EpisodeFacts,
        task_id=st.just("t"),
        task_score=score,
        turns=st.lists(turns, max_size=8).map(tuple),
        max_turns=st.integers(1, 30),
        truncated=st.booleans(),
    )


def episode(*turns: TurnFacts, task_score: float = 0.0) -> EpisodeFacts:
    return EpisodeFacts(task_id="t", task_score=task_score, turns=turns, max_turns=10)


def turn(*actions: ActionFacts, text: str = "", changed: float = 0.1) -> TurnFacts:
    return TurnFacts(text=text, parsed=True, actions=actions, changed_fraction=changed, boxes_before=(BOX,))


def typed(text: str) -> ActionFacts:
    return ActionFacts(kind="type", text=text)


def clicked(x: int, y: int) -> ActionFacts:
    return ActionFacts(kind="left_click", arguments={"coordinate": [x, y]}, point_px=(x, y))


# --- probes: episodes that solve nothing. One works on the task; the others only collect reward


PROBE_TURNS = 8


def probe_turn(verb: str, argument: str, *, changed: float, prose: str = "") -> TurnFacts:
    """Return a turn whose reply is in verb tags, the only grammar that every recipe can parse."""
    keys = tuple(argument.split("-")) if verb == "sendkey" else ()
    text = argument if verb == "type" else None
    return TurnFacts(
        text=f"{prose}<action>{verb} {argument}</action>",
        parsed=True,
        actions=(ActionFacts(kind=verb, arguments={"argument": argument}, text=text, keys=keys),),
        changed_fraction=changed,
        grey_difference=changed,
    )


def probe(name: str, turns: Sequence[TurnFacts], *, task_score: float = 0.0) -> EpisodeFacts:
    truncated = not turns[-1].done
    return EpisodeFacts(
        task_id=name, task_score=task_score, turns=tuple(turns), max_turns=PROBE_TURNS, truncated=truncated
    )


WORK = (
    ("sendkey", "meta_l-r"),
    ("type", "notepad"),
    ("sendkey", "ret"),
    ("type", "the quick brown fox"),
    ("sendkey", "ctrl-s"),
    ("type", "C:\\notes.txt"),
    ("sendkey", "ret"),
    ("sendkey", "alt-f4"),
)
DONE_TURN = TurnFacts(text="<done/>", parsed=True, done=True, changed_fraction=0.0, grey_difference=0.0)

HONEST = probe("honest progress", [probe_turn(*step, changed=0.05, prose="The next step. ") for step in WORK])
"""Works towards the file and fails, for example by a wrong name."""

SOLVED = probe("solved", [*(probe_turn(*step, changed=0.05) for step in WORK[:-1]), DONE_TURN], task_score=1.0)

HALF_SOLVED = probe("half solved", [*(probe_turn(*step, changed=0.05) for step in WORK[:3]), DONE_TURN], task_score=0.5)
"""Half of the checker's score, in few turns."""

EXPLOITS = (
    probe("null", [TurnFacts(text="", parsed=False, changed_fraction=0.0, grey_difference=0.0)] * PROBE_TURNS),
    probe("done only", [DONE_TURN]),
    probe("wait only", [probe_turn("wait", "2", changed=0.0)] * PROBE_TURNS),
    probe("repeat", [probe_turn("sendkey", "meta_l-r", changed=0.05)] * PROBE_TURNS),
    # Nothing has the focus: well-formed actions of the highest-paid kinds, and an unchanged screen.
    probe("format only", [*(probe_turn(*step, changed=0.0) for step in WORK[:-1]), DONE_TURN]),
)


#: Of the Windows example.
VERSIONS = ("v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12a", "v12b")


@cache
def all_recipes() -> dict[str, Recipe]:
    """Return the built-in recipes, and those of the examples."""
    return {
        **{name: recipe(name) for name in NAMES},
        "slime_osworld": recipe("docs.examples.own.slime_osworld:SlimeOSWorld"),
        **{f"modal_{each}": recipe("docs.examples.own.modal_windows:Modal", version=each) for each in VERSIONS},
    }


def not_below(reward: Recipe, reference: EpisodeFacts) -> list[str]:
    """Return the exploits that are rewarded at least as much as the reference episode."""
    minimum = reward(reference).total
    return [exploit.task_id for exploit in EXPLOITS if reward(exploit).total >= minimum]


def table() -> str:
    """Return the rewards of all probes under all recipes, as docs/evidence/rewards.md shows them."""
    episodes = (SOLVED, HALF_SOLVED, HONEST, *EXPLOITS)
    columns = [
        "recipe",
        *(episode.task_id for episode in episodes),
        "not below honest progress",
        "not below half solved",
    ]
    lines = [f"| {' | '.join(columns)} |", "|-" * len(columns) + "|"]
    for name, reward in all_recipes().items():
        totals = [f"{reward(episode).total:.3f}" for episode in episodes]
        winners = [", ".join(not_below(reward, reference)) or "-" for reference in (HONEST, HALF_SOLVED)]
        lines.append(f"| {' | '.join([f'`{name}`', *totals, *winners])} |")
    return "\n".join(lines)


# --- every recipe


@given(facts=episodes(scores))
def test_the_parts_of_every_recipe_sum_to_its_total_and_the_task_score_is_kept(facts: EpisodeFacts) -> None:
    for reward in all_recipes().values():
        breakdown = reward(facts)
        assert sum(breakdown.parts.values()) == pytest.approx(breakdown.total, abs=1e-9)
        assert breakdown.task_score == facts.task_score
        assert math.isfinite(breakdown.total)


def test_parts_that_do_not_sum_to_the_total_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parts of mine sum to 0\.5, not 0\.6"):
        Breakdown(recipe="mine", total=0.6, task_score=0.0, parts={"a": 0.25, "b": 0.25})


def test_an_unknown_recipe_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=r"unknown reward 'shapd'; did you mean shaped\?"):
        recipe("shapd")
    with pytest.raises(InputError, match="unknown reward 'mine'; choose one of task, shaped, or your own as module"):
        recipe("mine")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.zzz: unknown key; .*known keys:"):
        recipe(name, zzz=0.3)


def test_a_recipe_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(recipe("shaped", share=0.2))) == recipe("shaped", share=0.2)  # noqa: S301


def test_the_default_is_the_plain_task_score() -> None:
    assert recipe()(SOLVED) == Breakdown(recipe="task", total=1.0, task_score=1.0, parts={"task": 1.0})


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        (SOLVED.turns, 1.0),
        ((*SOLVED.turns[:-1], replace(SOLVED.turns[-1], done=False, failed=True)), 1.0),
        (SOLVED.turns[:-1], 0.0),
        ((*SOLVED.turns[:-1], TurnFacts(text="?", parsed=False), SOLVED.turns[-1]), 0.0),
        ((*SOLVED.turns[:-1], TurnFacts(text="?", parsed=False)), 0.0),
        ((), 0.0),
    ],
    ids=["done", "given up", "not ended", "unparsed before the end", "unparsed at the end", "no reply"],
)
def test_a_strict_score_is_for_episodes_that_the_agent_ended_in_the_grammar(
    turns: tuple[TurnFacts, ...], score: float
) -> None:
    facts = replace(SOLVED, turns=turns)
    assert recipe("task", strict=True)(facts).total == score
    assert recipe("task")(facts).total == 1.0
    assert recipe("task", strict=True)(replace(facts, task_score=0.0)).total == 0.0


# --- success comes first


@given(
    won=episodes(st.floats(0.5, 1.0)),
    lost=episodes(scores.filter(lambda score: score < 0.5)),
    share=st.floats(0.0, 0.5),
)
def test_a_shaped_failure_is_worth_less_than_a_success(won: EpisodeFacts, lost: EpisodeFacts, share: float) -> None:
    reward = recipe("shaped", share=share)
    assert reward(won).total > reward(lost).total
    assert reward(won).total == won.task_score


@given(
    won=episodes(st.just(1.0)), lost=episodes(scores.filter(lambda score: score < 1.0)), bar=st.sampled_from([0.5, 1.0])
)
def test_a_full_success_is_worth_more_than_anything_else(won: EpisodeFacts, lost: EpisodeFacts, bar: float) -> None:
    reward = recipe("shaped", success_at=bar)
    assert reward(won).total > reward(lost).total


@settings(max_examples=50)
@given(facts=st.lists(episodes(scores), min_size=2, max_size=4), by_deviation=st.booleans())
def test_normalising_a_group_keeps_success_before_failure(facts: list[EpisodeFacts], by_deviation: bool) -> None:
    rewards = [recipe("shaped")(each).total for each in facts]
    normal = group_advantages(rewards, by_deviation=by_deviation)
    for one, two, a, b in ((i, j, normal[i], normal[j]) for i in range(len(facts)) for j in range(len(facts))):
        if facts[one].task_score >= 0.5 > facts[two].task_score:
            assert a >= b
            assert a > b or rewards[one] - rewards[two] < 1e-9


@given(facts=episodes(scores.filter(lambda score: score < 0.5)))
def test_more_honest_work_is_always_worth_more(facts: EpisodeFacts) -> None:
    new = turn(typed("a text that was never typed before"))
    more = replace(facts, turns=(*facts.turns, new))
    reward = recipe("shaped")
    if 0.5 - facts.task_score > 1e-9:
        assert reward(more).total > reward(facts).total


@given(score=scores)
def test_shaping_leaves_the_order_of_task_scores_to_the_checker_alone_where_facts_are_equal(score: float) -> None:
    higher = min(1.0, score + 0.01)
    reward = recipe("shaped")
    work = HONEST
    assert reward(replace(work, task_score=higher)).total >= reward(replace(work, task_score=score)).total


@pytest.mark.parametrize(
    ("option", "value"),
    [("share", 0.51), ("share", float("nan")), ("share", True), ("success_at", 0.0), ("min_change", -1)],
)
def test_an_option_out_of_range_is_refused(option: str, value: float) -> None:
    with pytest.raises(InputError, match=option):
        recipe("shaped", **{option: value})


# --- gaming


def test_honest_progress_is_worth_more_than_every_exploit() -> None:
    assert not_below(recipe("shaped"), HONEST) == []
    assert not_below(recipe("shaped"), HALF_SOLVED) == []


def test_the_recipes_that_can_be_gamed_are_known() -> None:
    fooled = {name for name, reward in all_recipes().items() if not_below(reward, HONEST)}
    assert fooled == {"task", *(f"modal_{version}" for version in VERSIONS)}
    overpaid = {name for name, reward in all_recipes().items() if not_below(reward, HALF_SOLVED)}
    assert overpaid == {f"modal_v{version}" for version in ("5", "6", "7", "8", "9", "10", "11", "12a", "12b")}


def test_the_page_shows_the_current_table() -> None:
    page = Path(__file__).parents[4] / "docs" / "evidence" / "rewards.md"
    assert table() in page.read_text(encoding="utf-8"), f"put this table into {page}:\n{table()}"


# --- what seeds got wrong


def test_two_different_texts_are_not_a_repetition() -> None:
    """They were equal in Slime-OSWorld because neither has a point."""
    assert not same_action(typed("user"), typed("password"))
    assert not same_action(
        ActionFacts(kind="scroll", arguments={"dy": 3}), ActionFacts(kind="scroll", arguments={"dy": -3})
    )
    different = episode(turn(typed("user")), turn(typed("password")))
    same = episode(turn(typed("user")), turn(typed("user")))
    assert recipe("shaped")(different).total > recipe("shaped")(same).total


def test_clicks_on_nearby_points_are_a_repetition() -> None:
    steady = episode(*[turn(clicked(300, 300))] * 4)
    nearby = episode(*(turn(clicked(300 + index, 300 - index)) for index in range(4)))
    assert recipe("shaped")(nearby) == recipe("shaped")(steady)


def test_opening_and_closing_one_menu_counts_at_most_twice() -> None:
    few = [turn(ActionFacts(kind="key", keys=("win",))), turn(ActionFacts(kind="key", keys=("esc",)))]
    counted = recipe("shaped")(episode(*few * 2)).parts["progress"]
    often = recipe("shaped")(episode(*few * 20)).parts["progress"]
    assert often < counted


def test_enter_counts_again_after_each_new_text() -> None:
    enter = turn(ActionFacts(kind="key", keys=("enter",)))
    counted = episode(turn(typed("a")), enter, turn(typed("b")), enter)
    idle = episode(turn(typed("a")), enter, turn(typed("b")), turn(ActionFacts(kind="wait")))
    assert recipe("shaped")(counted).parts["progress"] > recipe("shaped")(idle).parts["progress"]


def test_a_letter_on_the_screen_does_not_ground_a_key() -> None:
    """Pressing "a" was grounded by Slime-OSWorld in every button with an "a" in its name."""
    pressed = replace(turn(ActionFacts(kind="key", keys=("a",))), tree_before="a button named Save As", tree_after="b")
    assert recipe("shaped")(episode(pressed)).parts["grounding"] == 0.0
    assert not hits_a_box(ActionFacts(kind="key", keys=("a",)), [BOX])


@pytest.mark.parametrize(
    ("point", "inside"),
    [((100, 100), True), ((149, 119), True), ((150, 119), False), ((149, 120), False), ((99, 100), False)],
)
def test_a_click_is_grounded_only_inside_a_box(point: tuple[int, int], inside: bool) -> None:
    assert hits_a_box(clicked(*point), [BOX]) is inside
    assert (recipe("shaped")(episode(turn(clicked(*point)))).parts["grounding"] > 0.0) is inside


def test_a_click_without_effect_is_not_rewarded() -> None:
    assert recipe("shaped")(episode(turn(clicked(110, 110), changed=0.0))).total == 0.0


def test_the_length_of_replies_has_no_effect() -> None:
    short, long = (episode(turn(typed("a"), text="x" * length)) for length in (1, 4000))
    assert recipe("shaped")(short) == recipe("shaped")(long)


def test_good_form_alone_is_not_rewarded() -> None:
    """A format reward that all episodes get is not a signal, and one that exploits get is a wrong signal."""
    formed = [replace(turn(typed(text), changed=0.0), text=f"<action>type {text}</action>") for text in "abcdef"]
    assert recipe("shaped")(episode(*formed)).total == 0.0


def test_a_reply_parsed_by_a_fallback_is_not_rewarded() -> None:
    guessed = replace(turn(typed("a")), parsed=False, fallback="quoted_text")
    assert recipe("shaped")(episode(guessed)).total == 0.0


def test_a_few_letters_count_though_the_screen_hardly_changes() -> None:
    few_pixels = replace(turn(typed("a"), changed=0.00001), tree_before="Name: ", tree_after="Name: a")
    assert recipe("shaped")(episode(few_pixels)).total > 0.0


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -0.1, 1.1])
def test_an_episode_without_a_valid_score_has_no_facts(score: float) -> None:
    with pytest.raises(ValueError, match="out of its group"):
        episode(task_score=score)


# --- groups


@pytest.mark.parametrize("rewards", [[], [0.3], [0.3] * 5, [0.1 + 0.2, 0.30000000000000004], [None, 1.0], [None, None]])
def test_a_group_of_equal_rewards_has_no_signal(rewards: list[float | None]) -> None:
    assert not has_signal(rewards)
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_advantages_are_normalised_deviations_from_the_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert group_advantages([1.0, 0.0], by_deviation=False) == [0.5, -0.5]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, float("nan")])
