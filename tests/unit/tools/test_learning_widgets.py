"""Drawn tasks as windows of GTK."""

import ast
import json

from envd.tasks.model import Task
from envd.tasks.verbs import WriteSetupFile
from tests.tools.learning.widgets import suite


def test_each_task_is_valid_and_its_forms_have_widgets_of_gtk_alone() -> None:
    tree = ast.parse(suite._SOURCE.read_text(encoding="utf-8"))
    patterns = [case.pattern for node in ast.walk(tree) if isinstance(node, ast.Match) for case in node.cases]
    known = {
        each.value.value
        for each in patterns
        if isinstance(each, ast.MatchValue) and isinstance(each.value, ast.Constant)
    }
    tasks = list(suite.real_tasks(range(2)))
    assert len(tasks) == 2 * 18
    for each in tasks:
        fields = {key: value for key, value in each.items() if key != "name"}
        setup = Task.model_validate({"task_id": f"widgets/{each['name']}", "domain": "forms", **fields}).setup
        written = [verb for verb in setup if isinstance(verb, WriteSetupFile) and verb.path.endswith(".form")]
        forms = [json.loads(verb.text or "") for verb in written]
        assert forms
        assert {widget["kind"] for form in forms for widget in form["widgets"]} <= known
