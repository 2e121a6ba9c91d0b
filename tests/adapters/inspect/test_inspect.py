"""inspect_ai's own evaluations, tool `computer()` and command line on drawn desktops."""

import base64
import gc
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval, task_with
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample, list_eval_logs, read_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironmentSpec, SandboxUnavailableError, SandboxUserUnsupportedError, sandbox
from PIL import Image

from cuaenv.actions import Action, AskUser, Done, EditFile, RunShell, WriteFile
from cuaenv.client import Unauthenticated
from envd.episodes.episode import Episode
from envd.episodes.events import EpisodeObserver, PerformedStep
from envd.tasks.model import Task as EnvdTask
from tests.support.desktops import DrawnDesktops
from tests.support.server import load_fake_tasks
from trainer.adapters.inspect_ai import EnvdConfig, EnvdSandbox, desktop, task_score

# Warnings of the framework are not ours.
pytestmark = pytest.mark.filterwarnings("default")
HERE = Path(__file__).parent
CLICK = {"action": "left_click", "coordinate": [822, 167]}


@pytest.fixture(autouse=True)
def daemon(desktops: DrawnDesktops, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ENVD_TARGET", desktops.address)
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    monkeypatch.chdir(tmp_path)
    yield
    # inspect does not close all its streams. Collect them here, where the warning is not an error.
    gc.collect()


def reply(tool: str, **arguments: Any) -> ModelOutput:
    output = ModelOutput.for_tool_call("mockllm/model", tool, arguments)
    # Without a usage, the mock model downloads a tokenizer to count.
    output.usage = ModelUsage()
    return output


def play(*replies: ModelOutput | Callable[[], ModelOutput], played: Task | None = None, **options: Any) -> EvalLog:
    """Evaluate a task with the given replies of the model; a callable runs when its reply is due."""

    def outputs() -> Iterator[ModelOutput]:
        for each in replies:
            yield each if isinstance(each, ModelOutput) else each()

    model = get_model("mockllm/model", custom_outputs=outputs())
    log = eval(played or desktop(tasks="fake/enable"), model=model, **options)[0]
    return read_eval_log(log.location, resolve_attachments=True)


def only_sample(log: EvalLog) -> EvalSample:
    assert log.samples is not None
    assert len(log.samples) == 1
    return log.samples[0]


def answers(log: EvalLog) -> list[Any]:
    return [message for message in only_sample(log).messages if message.role == "tool"]


def value_of(log: EvalLog) -> float:
    scores = only_sample(log).scores
    assert scores is not None
    value: float = scores["task_score"].as_float()
    return value


@pytest.mark.parametrize(("name", "score"), [("solved", 1.0), ("null", 0.0)])
def test_the_command_line_plays_a_task(tmp_path: Path, name: str, score: float) -> None:
    command = [sys.executable, "-m", "inspect_ai", "eval", f"{HERE}/played.py@{name}"]
    subprocess.run(command, check=True, env=dict(os.environ), timeout=250)
    (info,) = list_eval_logs(str(tmp_path / "logs"))
    log = read_eval_log(info)
    assert log.status == "success", log.error
    assert value_of(log) == score
    assert log.results is not None
    assert log.results.scores[0].metrics["mean"].value == score


def test_inspect_finds_the_sandbox_by_its_entry_point() -> None:
    (entry,) = [each for each in entry_points(group="inspect_ai") if each.value.startswith("trainer.")]
    assert entry.load().EnvdSandbox is EnvdSandbox


def test_the_computer_tool_shows_and_changes_the_desktop(desktops: DrawnDesktops) -> None:
    log = play(
        reply("computer", action="screenshot"),
        reply("computer", **CLICK),
        reply("computer", action="cursor_position"),
        reply("computer", action="zoom", region=[800, 150, 840, 190]),
        reply("computer", action="navigate", text="about:blank"),
        reply("computer", action="key", text="no-such-key"),
        reply("computer", action="wait", duration=1),
        reply("submit", answer="done"),
    )
    shown, clicked, cursor, zoomed, refused, unknown, waited = answers(log)
    assert size_of(shown) == size_of(clicked) == size_of(waited) == (1280, 800)
    assert cursor.text == "X=822,Y=167"
    assert size_of(zoomed) == (40, 40)
    assert "navigate is not available" in refused.error.message
    assert "no-such-key" in unknown.error.message
    assert value_of(log) == 1.0
    assert desktops.leased_count == 0


def test_a_zoom_has_the_detail_of_the_screen_and_a_wrong_one_is_answered(desktops: DrawnDesktops) -> None:
    log = play(
        reply("computer", action="screenshot"),
        reply("computer", action="zoom", region=[400, 75, 420, 95]),
        reply("computer", action="zoom", region=[420, 75, 400, 95]),
        reply("computer", action="zoom", region=[0, 0, 1280, 800]),
        reply("computer", action="left_click", coordinate=[700, 10]),
        reply("computer", action="left_click", coordinate=[411, 83]),
        reply("submit", answer="done"),
        played=desktop(tasks="fake/enable", max_width_px=640),
    )
    shown, zoomed, inverted, outside, missed, _ = answers(log)
    assert size_of(shown) == (640, 400)
    assert size_of(zoomed) == (40, 40)
    assert "is not a part of the picture" in inverted.error.message
    assert "at most [0, 0, 640, 400]" in outside.error.message
    assert "point (700, 10) is outside of the picture, which is 640x400 pixels" in missed.error.message
    assert value_of(log) == 1.0
    assert desktops.leased_count == 0


USER = {"facts": [{"about": "room", "answer": "In room 7."}], "max_questions": 1}


class _Steps(EpisodeObserver):
    """The actions of all steps."""

    def __init__(self) -> None:
        self.performed: list[Action] = []

    def stepped(self, episode: Episode, step: PerformedStep) -> None:
        self.performed += step.performed


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Steps]:
    """Steps on desktops whose task `fake/tools` allows tools."""
    blank = load_fake_tasks().get("fake/save-note").model_dump(exclude_unset=True, exclude={"oracle"})
    tools = {"task_id": "fake/tools", "tools": ("shell", "files", "ask_user"), "user": USER}
    desktops, observed = DrawnDesktops(extra_tasks=(EnvdTask.model_validate({**blank, **tools}),)), _Steps()
    desktops.server.service.events.add(observed)
    monkeypatch.setenv("ENVD_TARGET", desktops.address)
    yield observed
    desktops.wait_returned()
    desktops.close()


def test_the_tools_of_a_task_are_steps_and_a_refused_one_is_a_tool_error(steps: _Steps) -> None:
    note = {"path": "note.txt", "content": "Hello, desktop!"}
    log = play(
        reply("write_file", **note),
        reply("edit_file", path="note.txt", old="Hello, ", new="Hello, fake "),
        reply("run_shell", command="cat none.txt"),
        reply("ask_user", question="Which room?"),
        reply("ask_user", question="Which room, again?"),
        reply("read_file", path="none.txt"),
        reply("run_shell", command="true", timeout_s=100_000),
        reply("call_tool", server="calendar"),
        reply("submit", answer="done"),
        played=desktop(tasks="fake/tools"),
    )
    assert log.status == "success", log.error
    written, edited, failed, answered, *refused = answers(log)
    assert [each.error for each in (written, edited, failed, answered)] == [None] * 4
    assert "wrote 15 bytes" in written.text
    assert "exit code 1" in failed.text
    assert "In room 7." in answered.text
    messages = ["no more than 1 questions", "none.txt: No such file", "100000", "call_tool"]
    for answer, message in zip(refused, messages, strict=True):
        assert message in answer.error.message
    assert value_of(log) == 1.0
    assert steps.performed[:2] == [WriteFile(**note), EditFile("note.txt", "Hello, ", "Hello, fake ")]
    assert [type(each) for each in steps.performed[2:]] == [RunShell, AskUser, Done]


def test_a_task_without_tools_offers_none() -> None:
    log = play(reply("run_shell", command="true"), reply("submit", answer="done"))
    (answer,) = answers(log)
    assert "run_shell not found" in answer.error.message
    assert {tool.name for event in only_sample(log).events if event.event == "model" for tool in event.tools} == {
        "computer",
        "submit",
    }


def size_of(message: Any) -> tuple[int, int]:
    (picture,) = [part.image for part in message.content if part.type == "image"]
    size: tuple[int, int] = Image.open(io.BytesIO(base64.b64decode(picture.split(",")[1]))).size
    return size


def test_a_lost_machine_leaves_the_sample_unscored(desktops: DrawnDesktops) -> None:
    def killed() -> ModelOutput:
        desktops.kill_used_machines()
        return reply("computer", **CLICK)

    log = play(reply("computer", **CLICK), killed, reply("submit", answer="done"))
    assert answers(log)[1].error.type == "sandbox_unavailable"
    scores = only_sample(log).scores
    assert scores is not None
    assert math.isnan(scores["task_score"].as_float())
    assert "MACHINE_LOST" in str(scores["task_score"].explanation)
    # Excluded from the metrics, not counted as 0.
    assert log.results is not None
    assert log.results.scores[0].unscored_samples == 1


def test_a_machine_lost_before_its_evaluation_leaves_the_sample_unscored(desktops: DrawnDesktops) -> None:
    def killed() -> ModelOutput:
        desktops.kill_used_machines()
        return reply("submit", answer="done")

    assert math.isnan(value_of(play(reply("computer", **CLICK), killed)))


def test_a_task_that_cannot_be_done_is_declared_so() -> None:
    assert value_of(play(reply("submit", answer="FAIL"), played=desktop(tasks="fake/no-printer"))) == 1.0


def test_a_cancelled_evaluation_releases_its_machine(desktops: DrawnDesktops) -> None:
    def interrupted() -> ModelOutput:
        assert desktops.leased_count == 1
        raise KeyboardInterrupt

    try:
        log = play(reply("computer", **CLICK), interrupted)
        assert log.status in ("cancelled", "error")
    except KeyboardInterrupt:
        pass
    desktops.wait_returned()


@solver  # type: ignore[untyped-decorator]
def in_the_guest(work: Callable[[], Any]) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await work()
        return state

    return solve


def test_commands_and_files_of_the_guest() -> None:
    async def work() -> None:
        guest = sandbox()
        await guest.write_file("/home/user/hello.txt", "Grüße\r\n")
        assert await guest.read_file("/home/user/hello.txt") == "Grüße\r\n"
        assert await guest.read_file("/home/user/hello.txt", text=False) == "Grüße\r\n".encode()
        printed = await guest.exec(["cat", "/home/user/hello.txt"])
        assert (printed.success, printed.stdout) == (True, "Grüße\r\n")
        assert not (await guest.exec(["false"])).success
        with pytest.raises(FileNotFoundError):
            await guest.read_file("/home/user/none.txt")
        with pytest.raises(SandboxUserUnsupportedError):
            await guest.exec(["true"], user="alice")

    log = play(played=task_with(desktop(tasks="fake/enable"), solver=in_the_guest(work)))
    assert log.status == "success", log.error
    assert value_of(log) == 0.0


def test_an_action_after_the_end_is_text_for_the_model() -> None:
    async def work() -> None:
        one = sandbox().as_type(EnvdSandbox)
        await one.session.score()
        answer = await one.exec(["python3", "/opt/inspect/tool/computer_tool.py", "left_click"])
        assert "closed" in json.loads(answer.stdout)["error"]

    log = play(played=task_with(desktop(tasks="fake/enable"), solver=in_the_guest(work)))
    assert log.status == "success", log.error


@pytest.mark.parametrize(
    ("metadata", "config", "message"),
    [
        ({"task_id": "fake/none"}, EnvdConfig(), "fake/none"),
        ({}, EnvdConfig(), "Sample.metadata"),
        ({"task_id": "fake/enable"}, EnvdConfig(pool="none"), "none"),
        ({"task_id": "fake/enable"}, EnvdConfig(max_steps=-1), "max_steps"),
    ],
    ids=["task", "row", "pool", "steps"],
)
def test_a_wrong_sample_is_an_error_of_the_sample(metadata: dict[str, Any], config: EnvdConfig, message: str) -> None:
    wrong = Task(
        dataset=[Sample(input="x", metadata=metadata)],
        scorer=task_score(),
        sandbox=SandboxEnvironmentSpec("envd", config),
    )
    log = play(played=wrong)
    assert log.status == "error"
    error = only_sample(log).error
    assert error is not None
    assert message in error.message
    assert not only_sample(log).scores


async def test_a_wrong_token_is_an_error(guarded_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVD_TOKEN", "wrong")
    with pytest.raises(Unauthenticated):
        await EnvdSandbox.sample_init("t", EnvdConfig(envd=guarded_address), {"task_id": "fake/enable"})


async def test_a_daemon_that_cannot_be_reached_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EnvdConfig.settings
    monkeypatch.setattr(EnvdConfig, "settings", lambda self: _impatient(settings(self)))
    with pytest.raises(SandboxUnavailableError):
        await EnvdSandbox.sample_init("t", EnvdConfig(envd="127.0.0.1:1"), {"task_id": "fake/enable"})


def _impatient(settings: Any) -> Any:
    from dataclasses import replace
    from datetime import timedelta

    return replace(settings, reset_timeout=timedelta(seconds=1))


def test_the_example_of_the_docs(example: Callable[[str], str]) -> None:
    names: dict[str, Any] = {}
    exec(example("inspect_ai"), names)  # noqa: S102 -- our own page
    assert value_of(play(reply("computer", **CLICK), reply("submit", answer=""), played=names["enable"]())) == 1.0


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="no tasks fake/none"):
        desktop(tasks="fake/none")
