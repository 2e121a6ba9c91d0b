"""Drawn tasks as windows of GTK."""

import ast
import json

from PIL import Image

from cuaenv.client import Element
from envd.tasks.model import Task
from envd.tasks.verbs import WriteSetupFile
from tests.tools.learning.widgets import screens, suite


def test_each_task_is_valid_and_its_forms_have_widgets_of_gtk_alone() -> None:
    tree = ast.parse(suite._SOURCE.read_text(encoding="utf-8"))
    patterns = [case.pattern for node in ast.walk(tree) if isinstance(node, ast.Match) for case in node.cases]
    known = {
        each.value.value
        for each in patterns
        if isinstance(each, ast.MatchValue) and isinstance(each.value, ast.Constant)
    }
    tasks = list(suite.real_tasks(range(2)))
    assert len(tasks) == 2 * 21
    for each in tasks:
        fields = {key: value for key, value in each.items() if key != "name"}
        setup = Task.model_validate({"task_id": f"widgets/{each['name']}", "domain": "forms", **fields}).setup
        written = [verb for verb in setup if isinstance(verb, WriteSetupFile) and verb.path.endswith(".form")]
        forms = [json.loads(verb.text or "") for verb in written]
        assert forms
        assert {widget["kind"] for form in forms for widget in form["widgets"]} <= known


def test_widgets_have_the_names_of_their_labels_and_those_under_an_open_menu_are_left_out() -> None:
    form = (
        Element(role="frame", name="mango", box=(0, 0, 500, 270)),
        Element(role="label", name="hare", box=(260, 0, 119, 20)),
        Element(role="label", name="tiger", box=(260, 40, 119, 39)),
        Element(role="combo-box", name="", value="quail", box=(260, 83, 119, 40)),
        Element(role="check-box", name="rose", box=(12, 129, 121, 44), states=("checked",)),
        Element(role="push-button", name="delta", box=(270, 150, 120, 42)),
    )
    menu = (
        Element(role="window", name="", box=(262, 123, 115, 89)),
        Element(role="table-cell", name="quail", box=(267, 125, 105, 27)),
        Element(role="table-cell", name="flute", box=(267, 154, 105, 27)),
    )
    picture = Image.new("RGB", (512, 320))
    closed = [(each.kind, each.name, each.text, each.window) for each in screens.widgets_of(form, picture)]
    assert closed[2:] == [
        ("label", "hare", "hare", "mango"),
        ("label", "tiger", "tiger", "mango"),
        ("menu", "tiger", "quail", "mango"),
        ("box", "rose", "rose", "mango"),
        ("button", "delta", "delta", "mango"),
    ]
    shown = [*screens.widgets_of((*menu, *form[:4], *menu[1:], *form[4:]), picture)]
    assert [(each.kind, each.name, each.text) for each in shown] == [
        ("option", "quail", "quail"),
        ("option", "flute", "flute"),
        ("title", "mango", "mango"),
        ("close", "", ""),
        ("label", "hare", "hare"),
        ("label", "tiger", "tiger"),
        ("menu", "tiger", "quail"),
        ("box", "rose", "rose"),
    ]
    # A menu that opens upwards covers its own label.
    above = Element(role="window", name="", box=(262, 41, 115, 42))
    assert ("menu", "") in [(each.kind, each.name) for each in screens.widgets_of((above, *form), picture)]
    assert [tuple(each.rect) for each in shown[:2]] == [each.box for each in menu[1:]]
    assert [each.is_ticked for each in shown if each.kind == "box"] == [True]
