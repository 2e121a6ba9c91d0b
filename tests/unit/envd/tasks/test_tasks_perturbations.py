"""Perturbations: drawn from a seed, before or after the setup of a task."""

import pytest

from envd.base.errors import InvalidRequest
from envd.hypervisor.machine import GuestOs
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from envd.tasks.perturbations import KINDS, Perturb, perturb
from envd.tasks.verbs import Execute, Launch

TASK = TaskCatalogue.load().get("desktop/type-greeting")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_adds_its_verbs_to_the_setup_and_changes_nothing_else(kind: str) -> None:
    task, kinds = perturb(TASK, Perturb(seed=3, kinds=(kind,)))
    assert kinds == (kind,)
    own = len(TASK.setup)
    is_before = kind in {"background", "font_scale", "theme"}
    assert (task.setup[-own:] if is_before else task.setup[:own]) == TASK.setup
    assert len(task.setup) > own
    assert task.model_copy(update={"setup": TASK.setup, "freeze_setup": TASK.freeze_setup}) == TASK
    assert not task.freeze_setup
    assert Task.model_validate(task.model_dump(mode="json", exclude={"oracle"}, by_alias=True)).setup == task.setup


def test_equal_seeds_give_equal_worlds_and_others_differ() -> None:
    worlds = [perturb(TASK, Perturb(seed=seed, count=3)) for seed in range(40)]
    assert worlds == [perturb(TASK, Perturb(seed=seed, count=3)) for seed in range(40)]
    assert all(len(set(kinds)) == 3 for _, kinds in worlds)
    assert {kind for _, kinds in worlds for kind in kinds} == set(KINDS)
    assert len({task.model_dump_json(include={"setup"}) for task, _ in worlds}) == 40


def test_only_the_kinds_asked_for_are_drawn() -> None:
    for seed in range(20):
        _, kinds = perturb(TASK, Perturb(seed=seed, kinds=("update", "theme"), count=1))
        assert set(kinds) < {"update", "theme"}


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Perturb(seed=1, kinds=("tornado",)), "perturb.kinds: tornado: unknown; choose of background"),
        (Perturb(seed=1, kinds=("update",), count=2), "perturb.count: 2 is not 1 to 1"),
        (Perturb(seed=1, count=0), "perturb.count: 0 is not 1 to 8"),
        (Perturb(seed=1, count=9), "perturb.count: 9 is not 1 to 8"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wanted: Perturb, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        perturb(TASK, wanted)
    assert problem in str(refused.value)


def test_windows_tasks_are_refused() -> None:
    task = TASK.model_copy(update={"os": GuestOs.WINDOWS})
    with pytest.raises(InvalidRequest, match="not supported in windows guests"):
        perturb(task, Perturb(seed=1))


def test_no_pop_up_keeps_the_setup_waiting() -> None:
    for kind in KINDS:
        task, _ = perturb(TASK, Perturb(seed=5, kinds=(kind,)))
        for verb in set(task.setup) - set(TASK.setup):
            if isinstance(verb, Execute) and "sleep" in verb.argv[-1]:
                assert verb.argv[-1].endswith("</dev/null &")
            else:
                assert isinstance(verb, Launch | Execute)
