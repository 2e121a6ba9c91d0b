"""Parameters of tasks in files: marked texts become variants."""

from pathlib import Path

import pytest

from cuaenv.actions import TypeText
from envd.tasks.catalogue import TaskCatalogue, TaskFile, read_all
from envd.tasks.formats.entries import Problem
from envd.tasks.templates import split_of
from envd.tasks.verbs import WriteSetupFile

TASK = """
suite: shop
tasks:
- name: add-item
  level: 1
  {parameters}
  instruction: Add {{{{item}}}} to {{{{file}}}}.txt.
  setup:
  - {{kind: write_file, path: "/home/user/{{{{file}}}}.txt", text: ""}}
  checker: {{kind: file_text, path: "/home/user/{{{{file}}}}.txt", equals: "{{{{item}}}}\\n"}}
  oracle: [[{{type: "{{{{item}}}}"}}], [done]]
"""


def written(tmp_path: Path, parameters: str) -> TaskFile:
    path = tmp_path / "shop.yaml"
    path.write_text(TASK.format(parameters=parameters))
    return TaskFile(path)


def test_each_row_of_the_parameters_is_a_task(tmp_path: Path) -> None:
    file = written(tmp_path, "parameters: {item: [eggs, 7, tea], file: [a, b, c]}")
    tasks = TaskCatalogue.load([file], include_builtin=False).list()
    assert [task.task_id for task in tasks] == ["shop/add-item", "shop/add-item-2", "shop/add-item-3"]
    assert [task.instruction for task in tasks] == ["Add eggs to a.txt.", "Add 7 to b.txt.", "Add tea to c.txt."]
    assert [task.oracle[0] for task in tasks] == [(TypeText("eggs"),), (TypeText("7"),), (TypeText("tea"),)]
    (verb,) = tasks[1].setup
    assert isinstance(verb, WriteSetupFile)
    assert verb.path == "/home/user/b.txt"
    assert len({split_of(task) for task in tasks}) == 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("parameters: 3", "must be a mapping of names to lists"),
        ("parameters: {item: eggs, file: [a]}", "must be a mapping of names to lists"),
        ("parameters: {}", "the lists need one length"),
        ("parameters: {item: [], file: []}", "the lists need one length"),
        ("parameters: {item: [a, b], file: [a]}", "the lists need one length"),
        ("parameters: {item: [a]}", "and each mark be one: file"),
        ("parameters: {item: [a], file: [b], more: [c]}", "and each mark be one: more"),
    ],
)
def test_wrong_parameters_are_a_problem_with_the_line(tmp_path: Path, parameters: str, message: str) -> None:
    (problem,) = read_all([written(tmp_path, parameters)], include_builtin=False)
    assert isinstance(problem, Problem)
    assert (problem.task_id, problem.field, message in problem.message) == ("shop/add-item", "parameters", True)
    assert problem.where.endswith("shop.yaml:6")


def test_without_parameters_marks_are_texts(tmp_path: Path) -> None:
    (task,) = TaskCatalogue.load([written(tmp_path, "tags: [a]")], include_builtin=False).list()
    assert task.instruction == "Add {{item}} to {{file}}.txt."
