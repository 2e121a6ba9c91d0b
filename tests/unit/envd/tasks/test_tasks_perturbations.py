"""Perturbations: drawn from a seed, before or after the setup of a task."""

import pytest
from pydantic import ValidationError

from envd.base.errors import InvalidRequest
from envd.hypervisor.machine import GuestOs
from envd.tasks.basis import _NOT_SCORED, _digest, task_digest
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from envd.tasks.perturbations import _KINDS, KINDS, PerturbationDraw, own_perturb, perturb
from envd.tasks.verbs import Execute, Launch

FIELDS = {"task_id": "suite/name", "instruction": "Do it.", "level": 1, "infeasible": True}
TASK = TaskCatalogue.load().get("desktop/type-greeting")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_adds_its_verbs_to_the_setup_and_changes_nothing_else(kind: str) -> None:
    task, kinds = perturb(TASK, PerturbationDraw(seed=3, kinds=(kind,)))
    assert kinds == (kind,)
    own = len(TASK.setup)
    is_before = kind in {"background", "font_scale", "theme"}
    assert (task.setup[-own:] if is_before else task.setup[:own]) == TASK.setup
    assert len(task.setup) > own
    assert task.model_copy(update={"setup": TASK.setup, "freeze_setup": TASK.freeze_setup}) == TASK
    assert not task.freeze_setup
    assert Task.model_validate(task.model_dump(mode="json", exclude={"oracle"}, by_alias=True)).setup == task.setup


def test_equal_seeds_give_equal_worlds_and_others_differ() -> None:
    worlds = [perturb(TASK, PerturbationDraw(seed=seed, count=3)) for seed in range(40)]
    assert worlds == [perturb(TASK, PerturbationDraw(seed=seed, count=3)) for seed in range(40)]
    assert all(len(set(kinds)) == 3 for _, kinds in worlds)
    assert {kind for _, kinds in worlds for kind in kinds} == set(KINDS)
    assert len({task.model_dump_json(include={"setup"}) for task, _ in worlds}) == 40
    for seed in range(20):
        _, kinds = perturb(TASK, PerturbationDraw(seed=seed, kinds=("update", "theme"), count=1))
        assert set(kinds) < {"update", "theme"}


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (PerturbationDraw(seed=1, kinds=("tornado",)), "perturb.kinds: tornado: unknown; choose of background"),
        (PerturbationDraw(seed=1, kinds=("update",), count=2), "perturb.count: 2 is not 1 to 1"),
        (PerturbationDraw(seed=1, count=0), "perturb.count: 0 is not 1 to 8"),
        (PerturbationDraw(seed=1, count=9), "perturb.count: 9 is not 1 to 8"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wanted: PerturbationDraw, problem: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        perturb(TASK, wanted)
    assert problem in str(refused.value)


def test_a_task_draws_from_the_id_of_the_reset_and_keeps_its_digest_without_perturbations() -> None:
    perturbed = Task.model_validate({**FIELDS, "perturb": {"kinds": ["theme", "update"], "count": 1}})
    assert own_perturb(TASK, "r1") is None
    wanted = own_perturb(perturbed, "a/r1")
    assert wanted == own_perturb(perturbed, "a/r1") != own_perturb(perturbed, "a/r2")
    assert wanted is not None
    assert (wanted.kinds, wanted.count, 0 <= wanted.seed < 2**31) == (("theme", "update"), 1, True)
    assert set(Task.model_validate({**FIELDS, "perturb": {}}).perturb or ()) == {("kinds", KINDS), ("count", 1)}
    assert set(_KINDS) == set(KINDS)
    assert task_digest(Task.model_validate(FIELDS)) != task_digest(perturbed)
    without = Task.model_validate(FIELDS).model_dump(mode="json", exclude={"perturb", *_NOT_SCORED})
    assert task_digest(Task.model_validate(FIELDS)) == _digest(without)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"perturb": {"kinds": ["tornado"]}}, "perturb.kinds.0"),
        ({"perturb": {"kinds": ["theme", "theme"], "count": 2}}, "count: 2 is not 1 to 1"),
        ({"perturb": {"count": 9}}, "count: 9 is not 1 to 8"),
        ({"perturb": {"seed": 3}}, "perturb.seed"),
        ({"perturb": {}, "os": "windows"}, "perturb: not supported in windows guests"),
    ],
)
def test_a_task_file_with_impossible_perturbations_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Task.model_validate({**FIELDS, **fields})
    assert problem in str(refused.value)


def test_windows_tasks_are_refused() -> None:
    task = TASK.model_copy(update={"os": GuestOs.WINDOWS})
    with pytest.raises(InvalidRequest, match="not supported in windows guests"):
        perturb(task, PerturbationDraw(seed=1))


def test_no_pop_up_keeps_the_setup_waiting() -> None:
    for kind in KINDS:
        task, _ = perturb(TASK, PerturbationDraw(seed=5, kinds=(kind,)))
        for verb in set(task.setup) - set(TASK.setup):
            if isinstance(verb, Execute) and "sleep" in verb.argv[-1]:
                assert verb.argv[-1].endswith("</dev/null &")
            else:
                assert isinstance(verb, Launch | Execute)
