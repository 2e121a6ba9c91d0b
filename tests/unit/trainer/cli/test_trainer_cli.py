"""The `trainer` command: what it prints where, how it fails, and the table of two evaluations."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cuaenv.cli import terminal
from cuaenv.client import MachineLost
from trainer.cli import output
from trainer.cli.app import app
from trainer.cli.run_file import RunConfig, read_run
from trainer.evaluate.results import Attempt, ResultsFile, Run
from trainer.evaluate.selection import Selection


@output.reports_errors(LookupError)
def command(*, error: BaseException | None = None, as_json: bool = False) -> str:
    if error is not None:
        raise error
    return "done" if not as_json else "{}"


def results(path: Path, label: str, *scores: float) -> Path:
    with ResultsFile(path, Run(label=label, settings={}, prompt_hash="p")) as file:
        for number, score in enumerate(scores):
            attempt = Attempt(
                task_id=f"desktop/{number}",
                suite="desktop",
                level=1,
                domain="files",
                infeasible=False,
                seed=0,
                outcome="terminated",
                reason="done",
                score=score,
            )
            file.add(attempt)
    return path


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (output.UsageError("no [such] flag"), terminal.EXIT_USAGE),
        (MachineLost("gone"), terminal.EXIT_FAILED),
        (LookupError("lost"), terminal.EXIT_FAILED),
    ],
)
def test_a_failure_is_one_line_on_standard_error_and_an_object_with_json(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        command(error=error, as_json=True)
    out, err = capsys.readouterr()
    assert caught.value.exit_code == status
    assert json.loads(out) == {"error": {"reason": type(error).__name__, "message": str(error)}}
    assert err == f"error: {error}\n"


@pytest.mark.parametrize("to_continue", ["", "repeat the command to continue"])
def test_an_interrupted_command_has_the_exit_status_of_one_and_says_how_to_continue(
    to_continue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @output.reports_errors(to_continue=to_continue)
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        interrupted()
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == ("; ".join(filter(None, ("interrupted", to_continue))) + "\n")


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        command(error=ZeroDivisionError())
    assert command() == "done"


def test_without_a_terminal_progress_prints_a_first_and_a_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("eval [base]") as report:
        report("starting", 0, 3)
        report("1 of 1 done", 1, 3)
        report("2 of 3 done", 3, 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["eval [base]: 0/3 starting", "eval [base]: 3/3 2 of 3 done"]


def test_compare_prints_a_table_and_with_json_one_object(tmp_path: Path) -> None:
    before, after = results(tmp_path / "a.jsonl", "base", 0, 0, 1), results(tmp_path / "b.jsonl", "tuned", 1, 1, 1)
    text = CliRunner().invoke(app, ["compare", str(before), str(after)])
    assert text.exit_code == 0
    assert "33.3 %" in text.stdout
    assert "100.0 %" in text.stdout
    assert "+66.7" in text.stdout
    plain = CliRunner().invoke(app, ["compare", str(before), str(after), "--json"])
    row = json.loads(plain.stdout)["rows"][0]
    assert (row["group"], row["task_count"], row["gained"], row["lost"]) == ("all", 3, 2, 0)


def test_compare_of_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    failed = CliRunner().invoke(app, ["compare", str(tmp_path / "none"), str(tmp_path / "none")])
    assert failed.exit_code == terminal.EXIT_FAILED
    assert "trainer eval --out" in failed.stderr


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["eval"], 2, "use --endpoint URL for one model, --before URL and --after URL for two, or --by null for none"),
        (["eval", "--endpoint", "localhost:8000"], 1, "is not an endpoint"),
        (["eval", "--before", "http://127.0.0.1:9/v1"], 2, "--before URL and --after URL"),
        (["eval", "--perturb"], 2, "use it with --endpoint URL alone"),
        (["eval", "--perturb", "--before", "http://127.0.0.1:9/v1"], 2, "use it with --endpoint URL alone"),
        (["eval", "--by", "null", "--endpoint", "http://127.0.0.1:9/v1"], 2, "--by null plays without a model"),
        (["eval", "--by", "hand"], 2, "use model or null here"),
        (["eval", "no-such-file"], 2, "no-such-file cannot be read"),
        (["play", "fake/enable", "--by", "model"], 2, "--by model requires --endpoint"),
        (["play", "fake/enable", "--endpoint", "http://127.0.0.1:9/v1"], 2, "only --by model accepts it"),
        (["play", "fake/enable", "--by", "null", "--envd", "gpu.example.org:1"], 2, "clear text"),
        (["mcp", "--envd", "nowhere"], 2, "--envd nowhere: no port in 'nowhere'; give HOST:PORT"),
        (["mcp", "--http", "0.0.0.0:8000"], 2, "--http 0.0.0.0:8000: not a loopback address"),
        (["mcp", "--http", "127.0.0.1:99999"], 2, "--http 127.0.0.1:99999: not a loopback address"),
        (["mcp", "--http", "127.0.0.1:a:abc:"], 2, "--http 127.0.0.1:a:abc:: not a loopback address"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    words: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVD_TOKEN", "canary")
    failed = CliRunner().invoke(app, words)
    assert failed.exit_code == status
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1
    assert message in failed.stderr
    assert "canary" not in failed.stderr


def test_flags_of_an_evaluation_override_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "a"\nseeds = 3\ntemperature = 0.7\n[select]\nsuites = ["fake"]\nlimit = 9\n')
    flags = {"model": "b", "seeds": 1, "temperature": 0.0, "tls_ca": Path("ca.pem"), "select.limit": 0, "envd": ""}
    config = read_run(file, flags)
    assert (config.model, config.seeds, config.temperature, config.tls_ca) == ("b", 1, 0.0, Path("ca.pem"))
    assert (config.select.suites, config.select.limit) == (["fake"], 0)
    kept = read_run(file, dict.fromkeys(flags))
    assert (kept.model, kept.seeds, kept.temperature, kept.select.limit) == ("a", 3, 0.7, 9)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("sedes = 3", 2, "sedes: unknown key; did you mean seeds?"),
        ("seeds = 0", 2, "seeds is 0; it must be at least 1"),
        ("seeds = 3", 2, "set temperature"),
        ("request = 3", 2, "request is 3; it must be"),
        ("select = { level = [1] }", 2, "select.level: unknown key; did you mean levels?"),
        ('tasks_file = "no-such-file"', 1, "no-such-file cannot be read"),
        ("seeds", 2, "run.toml cannot be read: "),
    ],
)
def test_a_mistake_in_the_file_of_an_evaluation_is_reported(
    text: str, status: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    failed = CliRunner().invoke(app, ["eval", str(file), "--endpoint", "http://127.0.0.1:9/v1"])
    assert (failed.exit_code, failed.stdout) == (status, "")
    assert message in failed.stderr


def test_the_page_about_evaluation_names_every_key() -> None:
    page = (Path(__file__).parents[4] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    keys = [one.name for kind in (RunConfig, Selection) for one in fields(kind)]
    assert [key for key in keys if f"`{key}`" not in page and f"`[{key}]`" not in page] == []


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [('agent = "agent.yaml"', 2, "max_tokens: unknown key"), ('tls_ca = "no-such-file"', 2, "no-such-file")],
)
def test_files_that_the_file_names_are_read(
    text: str, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.yaml").write_text("agent:\n  max_tokens: 3\n")
    Path("run.toml").write_text(text)
    failed = CliRunner().invoke(app, ["play", "fake/enable", "run.toml", "--by", "null"])
    assert failed.exit_code == status
    assert message in failed.stderr


def test_a_missing_torch_is_named_with_the_extra_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "slime/rollout").mkdir(parents=True)
    # None in `sys.modules` makes an import fail as if the package were not installed.
    program = "import sys; sys.modules['torch'] = None; from trainer.cli import main; main()"
    command = [sys.executable, "-c", program, "sight", "--slime-home", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "the Python module torch is missing; run pip install 'envd-trainer[learn]'" in ended.stderr
