"""The commands of `envd tasks`: files are validated before anything boots, oracles are played through the service."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_envd

SOLVABLE = """
version: 1
suite: mine
tasks:
  - name: note
    level: 1
    instruction: Write it.
    checker: {kind: file_text, path: /home/user/note.txt, equals: it}
    oracle: [[{click: {x: 379, y: 311}}, {type: it}, {press: [ctrl, s]}], [done]]
  - name: box
    level: 1
    instruction: Check it.
    checker: {kind: on_screen, role: check-box, states: [checked]}
    oracle: [[{click: {x: 822, y: 167}}], [done]]
"""

SPARING = """
suite: sparing
tasks:
  - name: spared
    level: 1
    instruction: Write it.
    checker:
      kind: all
      checks:
        - {kind: file_text, path: /home/user/note.txt, equals: it}
        - {kind: unchanged, paths: [/home/user], except: [/home/user/note.txt]}
    oracle: [[{click: {x: 379, y: 311}}, {type: it}, {press: [ctrl, s]}], [done]]
  - name: touched
    level: 1
    instruction: Write it.
    checker:
      kind: all
      checks:
        - {kind: file_text, path: /home/user/note.txt, equals: it}
        - {kind: unchanged, paths: [/home/user]}
    oracle: [[{click: {x: 379, y: 311}}, {type: it}, {press: [ctrl, s]}], [done]]
"""

UNSOUND = """
suite: unsound
tasks:
  - name: oracle-is-wrong
    level: 1
    instruction: Write it.
    checker: {kind: file_text, path: /home/user/note.txt, equals: it}
    oracle: [[{type: other}], [done]]
  - name: nothing-scores
    level: 1
    instruction: Leave it.
    checker: {kind: file_absent, path: /home/user/note.txt}
    oracle: [[done]]
  - name: setup-fails
    level: 1
    instruction: Write it.
    setup: [{kind: execute, argv: ["false"]}]
    checker: {kind: file_absent, path: /home/user/note.txt}
    oracle: [[done]]
  - name: checker-breaks
    level: 1
    instruction: Write it.
    checker: {kind: command, argv: [no-such-program]}
    oracle: [[done]]
"""


def envd(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    places = ["--cache-dir", str(tmp_path / "cache")]
    done = run_envd("tasks", *arguments, "--hypervisor", "fake", "--json", *places)
    assert done.out, done.err
    return done.status, json.loads(done.out)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tasks.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_verify_plays_the_oracle_and_the_null_policy_in_each_task(tmp_path: Path) -> None:
    arguments = ("mine/", "fake/append-line", "--tasks", written(tmp_path, SOLVABLE), "--state-dir", str(tmp_path))
    status, report = envd(tmp_path, "verify", *arguments)
    played = {"accelerator": "fake", "tasks": 3, "oracle_ok": 3, "null_ok": 3}
    assert report == {**played, "skipped": [], "not_attacked": [], "left_out": [], "failures": []}
    assert status == 0


def test_the_start_of_a_task_without_setup_is_recorded_too(tmp_path: Path) -> None:
    file = written(tmp_path, SPARING)
    status, report = envd(tmp_path, "verify", "sparing/", "--tasks", file, "--state-dir", str(tmp_path))
    assert (status, report["oracle_ok"], report["null_ok"]) == (1, 1, 2)
    (failure,) = report["failures"]
    assert (failure["task_id"], failure["policy"], failure["score"]) == ("sparing/touched", "oracle", 0.0)
    assert "changed: '/home/user/note.txt'" in failure["detail"]


def test_verify_fails_if_a_task_of_the_suite_could_not_be_loaded(tmp_path: Path) -> None:
    broken = written(tmp_path, SOLVABLE.replace("    checker:", "    levels: 2\n    checker:", 1))
    status, report = envd(tmp_path, "verify", "mine/", "--tasks", broken, "--state-dir", str(tmp_path))
    assert (status, report["failures"]) == (1, [])
    assert report["left_out"] == [f"{broken}:8: task mine/note: levels: unknown key; did you mean level?"]


def test_verify_of_starts_plays_only_the_null_policy(tmp_path: Path) -> None:
    file = written(tmp_path, UNSOUND)
    arguments = ("unsound/oracle-is-wrong", "unsound/nothing-scores", "--tasks", file, "--state-dir", str(tmp_path))
    status, report = envd(tmp_path, "verify", "--starts", *arguments)
    assert status == 1
    assert (report["tasks"], report["oracle_ok"], report["null_ok"]) == (2, 0, 1)
    assert [each["task_id"] for each in report["failures"]] == ["unsound/nothing-scores"]


def test_verify_reports_unsound_tasks_and_continues_with_the_others(tmp_path: Path) -> None:
    file = written(tmp_path, UNSOUND)
    status, report = envd(tmp_path, "verify", "unsound/", "--tasks", file, "--state-dir", str(tmp_path))
    assert status == 1
    assert (report["tasks"], report["oracle_ok"], report["null_ok"]) == (4, 1, 1)
    failures = {(each["task_id"], each["policy"]): each for each in report["failures"]}
    assert failures["unsound/oracle-is-wrong", "oracle"]["score"] == 0.0
    assert failures["unsound/nothing-scores", "null"]["score"] == 1.0
    for policy in ("oracle", "null"):
        setup, checker = (failures[f"unsound/{name}", policy] for name in ("setup-fails", "checker-breaks"))
        assert setup["score"] is checker["score"] is None
        assert "false: exit code 1" in setup["detail"]
        assert "no-such-program" in checker["detail"]
    assert len(failures) == 6


def test_lint_reports_file_line_and_field_of_every_problem(tmp_path: Path) -> None:
    file = written(tmp_path, SOLVABLE.replace("level: 1", "level: 9").replace("equals", "equal"))
    status, report = envd(tmp_path, "lint", "--tasks", file)
    assert status == 1
    assert {(each["where"], each["field"]) for each in report["problems"]} >= {
        (f"{file}:6", "level"),
        (f"{file}:8", "checker.file_text.equal"),
    }
    status, report = envd(tmp_path, "lint", "--tasks", written(tmp_path, SOLVABLE))
    assert status == 0
    assert report["problems"] == []


def test_a_program_that_drawn_desktops_lack_is_reported_with_those_that_they_have(tmp_path: Path) -> None:
    verb = "{kind: launch, argv: [mousepad], window: {title: Untitled}}"
    file = written(tmp_path, SOLVABLE.replace("    checker:", f"    setup: [{verb}]\n    checker:", 1))
    status, report = envd(tmp_path, "verify", "mine/note", "--tasks", file, "--state-dir", str(tmp_path))
    assert status == 1
    assert len(report["failures"]) == 2
    for failure in report["failures"]:
        assert failure["detail"].endswith("directory: 'mousepad'; drawn desktops have editor, controls and form")


def test_show_prints_the_fields_of_task_files(tmp_path: Path) -> None:
    verb = "{kind: launch, argv: [a], window: {class: b}}"
    file = written(tmp_path, SOLVABLE.replace("    checker:", f"    setup: [{verb}]\n    checker:", 1))
    shown = run_envd("tasks", "show", "mine/note", "--tasks", file, "--hypervisor", "fake").out
    assert 'launch: {"argv":["a"],"window":{"class":"b"}}' in shown


def test_lint_reports_missing_assets(tmp_path: Path) -> None:
    verb = '{kind: download, files: [{url: "https://files.example.org/a", path: /home/user/a}]}'
    file = written(tmp_path, SOLVABLE.replace("    checker:", f"    setup: [{verb}]\n    checker:", 1))
    status, report = envd(tmp_path, "lint", "--tasks", file)
    assert status == 1
    [problem] = report["problems"]
    assert problem["task_id"] == "mine/note"
    assert "run `envd tasks fetch`" in problem["message"]


class Files(http.server.BaseHTTPRequestHandler):
    """Serves one file."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/a" else 404)
        self.end_headers()
        self.wfile.write(b"data" if self.path == "/a" else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_fetch_fills_the_cache_and_reports_failures(tmp_path: Path, site: str) -> None:
    verb = '{kind: download, files: [{url: "URL", path: /home/user/note.txt}]}'
    text = SOLVABLE.replace("    checker:", f"    setup: [{verb}]\n    checker:", 1)
    status, report = envd(tmp_path, "fetch", "--tasks", written(tmp_path, text.replace("URL", f"{site}/b")))
    assert (status, report["assets"], report["ready"]) == (1, 1, 0)
    assert "404" in report["failures"][0]["message"]
    file = written(tmp_path, text.replace("URL", f"{site}/a"))
    assert envd(tmp_path, "fetch", "mine/note", "--tasks", file) == (0, {"assets": 1, "ready": 1, "failures": []})
    assert envd(tmp_path, "fetch", "fake/", "--tasks", file) == (0, {"assets": 0, "ready": 0, "failures": []})
    assert run_envd("tasks", "fetch", "mine/nota", "--tasks", file).status == 1
    assert envd(tmp_path, "fetch", "--tasks", file) == (0, {"assets": 1, "ready": 1, "failures": []})
    assert envd(tmp_path, "lint", "--tasks", file)[0] == 0


SERVE = ("serve", "--hypervisor", "fake", "--pool", "1")


def test_serve_rejects_an_invalid_task_file_before_anything_starts(tmp_path: Path) -> None:
    # With one good task left, the others would be served.
    file = written(tmp_path, SOLVABLE.replace("file_text", "file_txt").replace("on_screen", "on_scren"))
    done = run_envd(*SERVE, "--tasks", file, "--state-dir", str(tmp_path))
    assert done.status == 2
    assert f"{file}:8: task mine/note: checker: unknown kind 'file_txt'; did you mean file_text?" in done.err
    assert "listening" not in done.out


def test_serve_rejects_a_world_readable_password_file(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    done = run_envd(*SERVE, "--state-dir", str(tmp_path), ENVD_TASKS__CLIENT_PASSWORD_FILE=str(secret))
    assert done.status == 2
    assert f"tasks.client_password_file: {secret} has mode 0644" in done.err
    assert "s3cret" not in done.out + done.err


def test_the_suites_are_listed_with_those_that_are_loaded_on_request(tmp_path: Path) -> None:
    # The user's own cache may have OSWorld's tasks.
    real = json.loads(run_envd("tasks", "suites", "--json", ENVD_CACHE_DIR=str(tmp_path)).out)["suites"]
    assert [(one["suite"], one["os"], one["served"]) for one in real] == [
        ("desktop", "linux", True),
        ("tools", "linux", False),
        ("windows", "windows", False),
    ]
    assert all(0 < one["held_out"] < one["tasks"] for one in real)
    drawn = run_envd("tasks", "suites", "--hypervisor", "fake").out
    assert "drawn" in drawn
    assert "windows" not in drawn
