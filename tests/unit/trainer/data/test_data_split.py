"""Selection of held-out tasks: by level, seed, task and text, for any order of tasks."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.client import Task
from trainer.config import InputError
from trainer.data.split import split


def task(task_id: str, instruction: str = "", *, level: int = 1, split: str = "train") -> Task:
    return Task(task_id=task_id, instruction=instruction, level=level, suite="", split=split)


def make_tasks(**per_level: int) -> list[Task]:
    return [
        task(f"{level}-{number}", f"do {level} {number}", level=int(level[1:]))
        for level, count in per_level.items()
        for number in range(count)
    ]


SOME = make_tasks(l1=30, l2=8, l3=6, l4=3)


def test_every_level_is_in_both_splits() -> None:
    held_out = [task_id for task_id, name in split(SOME).items() if name == "held_out"]
    assert {task_id[:2]: sum(other[:2] == task_id[:2] for other in held_out) for task_id in held_out} == {
        "l1": 6,
        "l2": 2,
        "l3": 1,
        "l4": 1,
    }


@given(order=st.randoms(use_true_random=False), seed=st.integers(0, 5))
def test_the_split_does_not_depend_on_the_order_of_tasks(order: random.Random, seed: int) -> None:
    shuffled = [*SOME, *SOME[:3]]
    order.shuffle(shuffled)
    assert split(shuffled, seed=seed) == split(SOME, seed=seed)


def test_another_seed_holds_out_other_tasks() -> None:
    assert split(SOME, seed=1) != split(SOME, seed=2)


def test_more_tasks_of_one_level_do_not_change_the_other_levels() -> None:
    before, after = split(SOME), split([*SOME, *make_tasks(l5=4)])
    assert all(after[task_id] == name for task_id, name in before.items())


def test_chunks_of_one_task_and_equal_texts_stay_together() -> None:
    chunks = [task(f"x_chunk{number}") for number in range(9)]
    same_text = [task(f"y{number}", text) for number, text in enumerate(["Do  it", "do it"])]
    for seed in range(20):
        splits = split([*SOME, *chunks, *same_text], seed=seed)
        assert len({splits[task.task_id] for task in chunks}) == 1
        assert splits["y0"] == splits["y1"]


def test_any_variants_of_one_template_stay_together() -> None:
    templates = [f"t{number}" for number in range(8)]
    plain = [task(template, f"plain {template}") for template in templates]
    variants = [
        task(f"{template}?seed={number}", f"{template} {number}") for template in templates for number in (7, 123)
    ]
    for seed in range(10):
        by_plain, by_variants = split(plain, seed=seed), split(variants, seed=seed)
        assert split([*plain, *variants], seed=seed) == {**by_plain, **by_variants}
        for template in templates:
            sides = {by_variants[f"{template}?seed={number}"] for number in (7, 123)}
            assert sides == {by_plain[template]}


def test_a_template_with_a_variant_that_equals_a_held_out_one_is_held_out() -> None:
    variants = [
        task("kept?seed=1", "Sort the list", split="held_out"),
        task("other?seed=1", "sort  the list"),
        task("other?seed=2", "Sort the names"),
        task("third", "Open it"),
    ]
    assert {task_id for task_id, name in split(variants).items() if name == "train"} == {"third"}


def test_equal_texts_join_groups_that_ids_separated() -> None:
    linked = [task("a_chunk0", "one"), task("b_chunk0", "two"), task("b_chunk1", "one")]
    for seed in range(10):
        splits = split([*SOME, *linked], seed=seed)
        assert len({splits[task.task_id] for task in linked}) == 1


def test_the_suites_own_split_is_kept() -> None:
    given_split = [replace(each, split="held_out" if "-0" in each.task_id else "train") for each in SOME]
    assert {task_id for task_id, name in split(given_split).items() if name == "held_out"} == {
        "l1-0",
        "l2-0",
        "l3-0",
        "l4-0",
    }


def test_a_level_of_one_task_is_used_for_training_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    splits = split([*SOME, *make_tasks(l5=1)])
    assert splits == {**split(SOME), "l5-0": "train"}
    assert "level 5 has a single task, l5-0: it is used for training only" in caplog.text


def test_tasks_that_all_have_a_level_of_their_own_cannot_be_split() -> None:
    with pytest.raises(InputError, match=r"0 of 2 tasks would be held out, because no level has two.*a share of 0"):
        split(make_tasks(l1=1, l5=1))
    assert set(split(make_tasks(l5=1), share=0).values()) == {"train"}


def test_a_level_that_a_suites_own_split_leaves_out_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    tagged = [task("a", split="held_out"), *make_tasks(l1=2, l2=2)]
    splits = split(tagged)
    assert [task_id for task_id, side in splits.items() if side == "held_out"] == ["a"]
    (record,) = [each for each in caplog.records if "level 2: the suite itself holds out 0 of its 2" in each.message]
    assert record.levelname == "INFO"
