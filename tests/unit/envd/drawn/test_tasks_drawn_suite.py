"""The drawn suite: on a screen of 512x320 oracles solve each variant, and random input almost never does."""

import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from cuaenv.actions import Action, Click, Done, Drag, TypeText
from envd.base.config import Config
from envd.daemon.suites import load_tasks
from envd.drawn.desktop.canvas import Framebuffer
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.desktop.forms import read_form
from envd.drawn.files import DrawnFiles
from envd.drawn.suite import DRAWN
from envd.drawn.suite.desk import WORDS
from envd.tasks.checker_union import leaves
from envd.tasks.checkers.files import FileText
from envd.tasks.model import Task
from envd.tasks.oracle import split_step, without_target
from envd.tasks.templates import Template, split_of
from envd.tasks.verbs import Launch, WriteSetupFile

TEMPLATES = list(DRAWN.by_id.values())
SEEDS = (None, *range(20))
each_template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.task_id)


def opened(task: Task) -> DrawnDesktop:
    """Return a desktop after the task's setup."""
    desktop = DrawnDesktop(Framebuffer(np.zeros((320, 512, 4), np.uint8), shared=False), files=DrawnFiles())
    for verb in task.setup:
        match verb:
            case WriteSetupFile():
                desktop.files[verb.path] = verb.data()
            case Launch():
                assert desktop.launch(*verb.argv)
    return desktop


def perform(desktop: DrawnDesktop, actions: Iterable[Action]) -> None:
    for action in actions:
        match action:
            case Click():
                desktop.pointer(action.x or 0, action.y or 0, 1)
                desktop.pointer(action.x or 0, action.y or 0, 0)
            case Drag():
                desktop.pointer(action.start_x or 0, action.start_y or 0, 1)
                desktop.pointer(action.end_x, action.end_y, 1)
                desktop.pointer(action.end_x, action.end_y, 0)
            case TypeText():
                desktop.type_text(action.text)
            case Done():
                pass
            case _:
                raise AssertionError(action)


def is_solved(desktop: DrawnDesktop, task: Task) -> bool:
    assert task.checker is not None
    checks = [check for check in leaves(task.checker) if isinstance(check, FileText)]
    assert checks
    return all(desktop.files[check.path].decode().rstrip("\n") == check.equals for check in checks)


@each_template
def test_the_oracle_solves_each_variant_and_no_action_solves_none(template: Template) -> None:
    for seed in SEEDS:
        task = template.variant(seed)
        desktop = opened(task)
        assert not is_solved(desktop, task), f"seed {seed}"
        for step in task.oracle:
            perform(desktop, map(without_target, split_step(step)[0]))
        assert is_solved(desktop, task), f"seed {seed}"
        fewest, most = {"drawn": (2, 7), "escape": (3, 6), "long": (9, 17)}[template.task_id.partition("/")[0]]
        assert fewest <= len(task.oracle) <= most


def test_random_input_solves_less_than_one_task_in_fifty() -> None:
    rng = random.Random(0)
    solved = 0
    trials = 10 * len(TEMPLATES)
    for index in range(trials):
        task = TEMPLATES[index % len(TEMPLATES)].variant(index)
        desktop = opened(task)
        for _ in task.oracle:
            x, y, to_x, to_y = (rng.randrange(limit) for limit in (512, 320, 512, 320))
            actions: list[Action] = [Click(x, y), Drag(x, y, to_x, to_y), TypeText(rng.choice(WORDS))]
            perform(desktop, [rng.choice(actions)])
        solved += is_solved(desktop, task)
    assert solved < trials / 50


def test_the_suite_has_templates_of_both_splits_and_thousands_of_variants() -> None:
    splits = Counter((each.task_id.partition("/")[0], split_of(each.variant(None))) for each in TEMPLATES)
    assert {suite: (splits[suite, "train"], splits[suite, "held_out"]) for suite, _ in splits} == {
        "drawn": (19, 5),
        "long": (7, 3),
        "escape": (4, 2),
    }
    assert all(template.variant_count > 10_000 for template in TEMPLATES)
    trained = {word for template in TEMPLATES for word in _clauses(template, "train")}
    held_out = {word for template in TEMPLATES for word in _clauses(template, "held_out")}
    assert held_out <= trained
    catalogue = load_tasks(Config.model_validate({"hypervisor": {"uri": "fake"}}))
    assert catalogue.get("drawn/copy-across?seed=7").split == "train"
    assert {"drawn", "long", "escape", "fake"} == {task.task_id.partition("/")[0] for task in catalogue.list()}


def test_the_end_of_a_sentence_does_not_tell_whether_its_beginning_types() -> None:
    """A policy for which it did solved no variant of `choose_press`."""
    begun: dict[str, set[str]] = {}
    for template in TEMPLATES:
        if template.task_id.startswith("drawn/") and len(verbs := _clauses(template, "train")) > 1:
            begun.setdefault(verbs[-1], set()).add(verbs[0])
    held_out = {
        verbs[-1] for each in TEMPLATES if each.task_id.startswith("drawn/") and (verbs := _clauses(each, "held_out"))
    }
    assert held_out == {"press", "tick"}
    assert all("set" in begun[verb] and begun[verb] & {"write", "copy"} for verb in held_out)


def _clauses(template: Template, split: str) -> list[str]:
    task = template.variant(None)
    return [clause.split()[0].lower() for clause in task.instruction.split(", then ")] if task.split == split else []


@each_template
def test_widgets_lie_inside_their_windows_and_show_their_names(template: Template) -> None:
    for seed in SEEDS:
        for verb in template.variant(seed).setup:
            if isinstance(verb, WriteSetupFile):
                form = read_form(verb.path, verb.data())
                assert form.x + form.w <= 512
                assert form.y + form.h <= 288
                for widget in form.widgets:
                    assert widget.x + widget.w <= form.w
                    assert widget.y + widget.h + 36 * len(widget.options) <= form.h
                    room = widget.w - (24 if widget.kind == "box" else 0) - 4
                    assert len(widget.name) * 18 <= room or widget.fill


PAGES = [each for each in TEMPLATES if each.domain == "pages"]


@pytest.mark.parametrize("template", PAGES, ids=lambda template: template.task_id)
def test_a_page_that_is_left_early_and_a_wrong_item_cannot_be_undone(template: Template) -> None:
    """The oracle follows after either mistake, and it does not help."""
    task = template.variant(3)
    forms = [read_form(verb.path, verb.data()) for verb in reversed(task.setup) if isinstance(verb, WriteSetupFile)]
    leave = next(each for each in forms[0].widgets if each.closes)
    with_items = [(form, each) for form in forms for each in form.widgets if each.needed]
    assert with_items, "a page has an item that must stay"
    desktop = opened(task)
    perform(desktop, [Click(forms[0].x + leave.x + 60, forms[0].y + leave.y + 20)])
    for step in task.oracle:
        perform(desktop, map(without_target, split_step(step)[0]))
    assert not is_solved(desktop, task)
    form, item = with_items[0]
    desktop = opened(task)
    for step in task.oracle:
        if desktop.active is not None and desktop.active.title == form.title:
            perform(desktop, [Click(form.x + item.x + 60, form.y + item.y + 20)])
        perform(desktop, map(without_target, split_step(step)[0]))
    assert not is_solved(desktop, task)
    assert not [window for window in desktop.windows if window.title == form.title], "and the oracle came to its end"


@pytest.mark.parametrize("template", PAGES, ids=lambda template: template.task_id)
def test_only_pages_of_escape_have_a_power_button(template: Template) -> None:
    verbs = template.variant(1).setup
    forms = [read_form(verb.path, verb.data()) for verb in verbs if isinstance(verb, WriteSetupFile)]
    powers = [sum(each.kind == "power" for each in form.widgets) for form in forms]
    assert powers == [int(template.task_id.startswith("escape/"))] * len(forms)
