"""Templates: variants are reproducible, and held-out templates are not in the training split."""

import itertools
import re
from functools import cache

import pytest

from envd.base.errors import ConfigError, TaskNotFound
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from envd.tasks.suites.desktop import DESKTOP
from envd.tasks.templates import MAX_SEED, Entry, Sampler, Template, Templates, split_of, template_id_of

CATALOGUE = TaskCatalogue.load()
TEMPLATES = list(DESKTOP.by_id.values())
SEEDS = range(25)


def impossible(rng: Sampler) -> Entry:
    """Build one of three tasks."""
    return {"instruction": f"Find the {rng.choice(('unicorn', 'griffin', 'sphinx'))}.", "infeasible": True}


@pytest.fixture
def mine() -> Templates:
    templates = Templates("mine")
    templates.add(level=2, domain="fables")(impossible)
    return templates


def test_a_template_without_a_seed_and_with_all_seeds(mine: Templates) -> None:
    task = TaskCatalogue([], templates=mine).get("mine/impossible")
    assert (task.instruction, task.level, task.domain) == ("Find the unicorn.", 2, "fables")
    catalogue = TaskCatalogue([], templates=mine)
    drawn = {catalogue.get(f"mine/impossible?seed={seed}").instruction for seed in range(50)}
    assert len(drawn) == catalogue.variant_count("mine/impossible") == 3
    assert catalogue.variant_count("mine/other") == 1


def test_the_variants_of_a_template_are_counted_once() -> None:
    built: list[Sampler] = []

    def build(sampler: Sampler) -> dict[str, object]:
        built.append(sampler)
        return {"instruction": sampler.choice(["a", "b"])}

    template = Template(task_id="mine/one", level=1, domain="", build=build)
    assert [template.variant_count for _ in range(3)] == [2, 2, 2]
    assert len(built) == 1


def test_adding_tasks_to_a_catalogue_keeps_its_templates(mine: Templates) -> None:
    task = CATALOGUE.get("desktop/open-calculator")
    catalogue = TaskCatalogue([], templates=mine).with_tasks([task])
    assert catalogue.get("mine/impossible?seed=7").instruction
    assert catalogue.list() == (task,)


@pytest.mark.parametrize(
    "tail", ["?seed=", "?seed=x", "?seed=-1", "?seed=01", "?seed=1.0", "?seeds=1", f"?seed={MAX_SEED + 1}"]
)
def test_a_malformed_seed_is_rejected_with_the_correct_form(mine: Templates, tail: str) -> None:
    with pytest.raises(TaskNotFound, match=re.escape("use mine/impossible?seed=N, N from 0 to 2147483647")):
        TaskCatalogue([], templates=mine).get(f"mine/impossible{tail}")


def test_a_variant_without_a_template_is_not_found(mine: Templates) -> None:
    with pytest.raises(TaskNotFound, match="task 'mine/other"):
        TaskCatalogue([], templates=mine).get("mine/other?seed=1")


def test_two_templates_with_one_name_are_rejected(mine: Templates) -> None:
    with pytest.raises(ValueError, match="mine/impossible"):
        mine.add(level=1, domain="fables")(impossible)


def test_a_task_with_the_name_of_a_template_is_rejected() -> None:
    task = CATALOGUE.get("desktop/delete-line")
    with pytest.raises(ConfigError, match="desktop/delete-line"):
        TaskCatalogue([task, task])


def test_the_samples_of_a_seed_never_change() -> None:
    task = CATALOGUE.get("desktop/change-weekday?seed=17")
    assert "change the word Monday to Sunday" in task.instruction
    rng = Sampler("desktop/golden", 17)
    assert (rng.randint(0, 10**6), rng.sample("abcdef", 3), rng.choice("xyz")) == (673292, ["b", "e", "a"], "x")


@cache
def variants_of(template: Template) -> list[Task]:
    """Return a template's variants of all `SEEDS`, built once."""
    return [template.variant(seed) for seed in SEEDS]


def test_every_variant_is_a_task_in_the_split_of_its_template() -> None:
    for template in TEMPLATES:
        assert [CATALOGUE.get(f"{template.task_id}?seed={seed}") for seed in SEEDS] == variants_of(template)
    for template in TEMPLATES:
        assert {split_of(task) for task in variants_of(template)} == {split_of(template.variant(None))}


def test_the_suite_has_40_tasks_and_over_a_million_variants() -> None:
    tasks = CATALOGUE.list()
    assert len(tasks) >= 40
    assert {task.level for task in tasks} == {1, 2, 3, 4, 5}
    assert {template.domain for template in TEMPLATES} == {
        *("calculator", "editor", "files", "flows", "images", "settings", "spreadsheet", "terminal")
    }
    assert sum(min(template.variant_count, 100_000) for template in TEMPLATES) > 1_000_000
    for template in TEMPLATES:
        same_id = [task.model_copy(update={"task_id": "x/y"}) for task in variants_of(template)]
        seen = {task.model_dump_json(exclude={"oracle"}) for task in same_id}
        assert len(seen) >= len(SEEDS) * 0.6, template.task_id
        assert template.variant_count >= 80, template.task_id


def test_both_splits_have_every_level_and_every_large_domain() -> None:
    parts: dict[str, list[Task]] = {"train": [], "held_out": []}
    for task in CATALOGUE.list():
        parts[split_of(task)].append(task)
    assert 0.15 < len(parts["held_out"]) / len(CATALOGUE) < 0.35
    for tasks in parts.values():
        assert {task.level for task in tasks} == {1, 2, 3, 4, 5}
        assert {task.domain for task in tasks} >= {"editor", "files", "flows", "images", "spreadsheet", "terminal"}


def test_a_tasks_own_split_takes_precedence() -> None:
    task = CATALOGUE.get("desktop/open-calculator")
    for part in ("train", "held_out"):
        assert split_of(task.model_copy(update={"split": part})) == part


def test_no_held_out_instruction_is_in_the_training_split() -> None:
    """Neither an equal instruction, nor one that differs only in names and numbers."""
    texts: dict[str, set[str]] = {"train": set(), "held_out": set()}
    frames: dict[str, dict[str, set[str]]] = {"train": {}, "held_out": {}}
    for task in CATALOGUE.list():
        part = split_of(task)
        template = DESKTOP.by_id.get(template_id_of(task.task_id))
        variants = [task, *(variants_of(template) if template else ())]
        texts[part] |= {variant.instruction for variant in variants}
        # The words common to all variants are the template's own.
        frames[part][task.task_id] = set.intersection(*(_words(variant.instruction) for variant in variants))
    assert not texts["train"] & texts["held_out"]
    for (one, words), (other, others) in itertools.product(frames["train"].items(), frames["held_out"].items()):
        assert len(words & others) / len(words | others) < 0.6, f"{one} and {other} ask the same"


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))
