"""Tasks are chosen by how often they were solved so far."""

import pytest

from trainer.data.curriculum import TaskChoice, TaskHistory, by_solve_rate, curriculum_of


@pytest.mark.parametrize(
    ("solved", "count", "passed_over", "expected"),
    [
        (0, 0, 0, True),
        (0, 7, 0, True),
        (0, 8, 0, False),
        (0, 32, 1, False),
        (0, 32, 2, True),
        (1, 32, 0, True),
        (2, 10, 0, True),
        (8, 10, 0, True),
        (9, 10, 0, False),
        (10, 10, 8, False),
        (10, 10, 9, True),
    ],
)
def test_a_task_is_played_while_its_groups_have_signal(
    solved: int, count: int, passed_over: int, expected: bool
) -> None:
    episodes = (True,) * solved + (False,) * (count - solved)
    assert by_solve_rate(TaskHistory(task_id="t", solved=episodes, passed_over=passed_over)) is expected


def test_variants_share_the_rate_of_their_template_and_old_episodes_are_forgotten() -> None:
    tasks = TaskChoice(curriculum_of("solve_rate"))
    for seed in range(8):
        tasks.record(f"drawn/press?seed={seed}", solved=True)
    assert not tasks.plays("drawn/press?seed=99")
    assert tasks.plays("drawn/type?seed=99")
    for _ in range(16):
        tasks.record("drawn/press?seed=1", solved=False)
    assert tasks.plays("drawn/press?seed=99")
    assert len(tasks.state()["drawn/press"]) == 24
    for _ in range(32):
        tasks.record("drawn/press?seed=1", solved=False)
    assert tasks.state() == {"drawn/press": [False] * 32}


@pytest.mark.parametrize(("solved", "expected"), [(False, [False, False, True] * 6), (True, [*[False] * 9, True] * 2)])
def test_an_unsolved_task_is_tried_at_each_third_draw_and_an_easy_one_at_each_tenth(
    solved: bool, expected: list[bool]
) -> None:
    tasks = TaskChoice(by_solve_rate)
    for _ in range(8):
        tasks.record("t", solved=solved)
    assert [tasks.plays("t") for _ in expected] == expected


def test_what_is_known_can_be_resumed() -> None:
    tasks, again = TaskChoice(by_solve_rate), TaskChoice(by_solve_rate)
    for _ in range(8):
        tasks.record("t", solved=True)
    again.resume(tasks.state())
    assert again.state() == tasks.state() == {"t": [True] * 8}
    assert not again.plays("t")


def test_the_example_looks_at_easy_tasks_again() -> None:
    own = curriculum_of("docs.examples.own.my_curriculum:not_yet_easy")
    easy = TaskHistory(task_id="t", solved=(True,) * 10)
    assert own(TaskHistory(task_id="t"))
    assert not own(easy)
    assert own(TaskHistory(task_id="t", solved=(True,) * 10, passed_over=19))
