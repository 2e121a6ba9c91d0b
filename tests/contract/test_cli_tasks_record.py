"""`envd tasks record` by a script, and what people press while it records, on drawn desktops."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from cuaenv.actions import Action, Click, Drag, MouseDown, MouseUp, Move, Scroll, TypeText
from cuaenv.client import AsyncEpisode, View
from envd.authoring.demonstration import Proposal
from envd.authoring.playing import play
from envd.authoring.targets import GuestScreen, TargetRecorder, read_screen
from envd.cli import tasks_record
from envd.episodes.progress import merged
from envd.hypervisor.machine import GuestOs
from envd.tasks.oracle import Aimed, OracleAction, Target
from tests.support.command import run_envd
from tests.support.server import served_client

SCRIPT = [[{"press": ["ctrl", "end"]}, {"type": "eggs"}], [{"press": ["ctrl", "s"]}]]
SETUP = [
    {"kind": "write_file", "path": "/home/user/list.txt", "text": "milk\n"},
    {"kind": "write_file", "path": "/home/user/other.txt", "text": "stays\n"},
    {"kind": "open", "path": "/home/user/list.txt", "program": "editor"},
]


def record(tmp_path: Path, script: object, *, setup: Sequence[Any] = SETUP) -> tuple[int, str]:
    for name, value in (("script", script), ("setup", setup)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
    words = ("tasks", "record", "shop/add", "--instruction", "Add eggs.", "--hypervisor", "fake", "--accept")
    files = ("--script", str(tmp_path / "script.yaml"), "--setup", str(tmp_path / "setup.yaml"))
    done = run_envd(*words, *files, "--out", str(tmp_path), "--state-dir", str(tmp_path / "state"))
    return done.status, done.out + done.err


def test_what_a_script_changed_becomes_the_checker(tmp_path: Path) -> None:
    status, text = record(tmp_path, SCRIPT)
    assert status == 0, text
    (task,) = yaml.safe_load((tmp_path / "shop-add.yaml").read_text())["tasks"]
    changed, rest = task["checker"]["checks"]
    assert changed == {"kind": "file_text", "path": "/home/user/list.txt", "equals": "milk\neggs"}
    assert (rest["kind"], rest["except"][-1]) == ("unchanged", "/home/user/list.txt")
    assert task["oracle"] == [*SCRIPT, [{"done": ""}]]
    assert "exists" in record(tmp_path, SCRIPT)[1]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([[{"press": "f1"}]], "no checker was chosen"),
        ([[{"press": "f1"}], [{"clck": {}}]], "script.yaml: step 1: action: unknown action 'clck'"),
        ([{"press": "f1"}], "script.yaml: step 0: is not a list of actions"),
        ({}, "not a YAML"),
    ],
)
def test_a_script_that_changes_nothing_or_is_malformed_writes_no_task(
    tmp_path: Path, script: object, error: str
) -> None:
    status, text = record(tmp_path, script)
    assert (status, error in text, (tmp_path / "shop-add.yaml").exists()) == (2, True, False), text


def test_a_wrong_setup_is_reported_with_its_own_file(tmp_path: Path) -> None:
    status, text = record(tmp_path, SCRIPT, setup=[*SETUP, {"kind": "opened", "path": "/home/user/list.txt"}])
    assert status == 2
    assert f"--setup {tmp_path}/setup.yaml: setup[3]: unknown kind 'opened'; did you mean open?" in text
    assert ".shop-add.yaml" not in text


def test_an_id_that_exists_is_refused_in_one_line(tmp_path: Path) -> None:
    words = ("tasks", "record", "fake/save-note", "--instruction", "x", "--hypervisor", "fake", "--out", str(tmp_path))
    done = run_envd(*words, "--state-dir", str(tmp_path / "state"))
    assert done.status == 2
    assert "error: fake/save-note: duplicate id, already in" in done.err


def test_a_wrong_answer_is_asked_for_again_and_loses_no_demonstration(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["first", "0", "3", "", "-1", "2, 1"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    proposals = [Proposal(what=name, checker={}) for name in ("a file", "a window")]
    assert tasks_record._chosen(proposals, accept=False) == [0, 1]
    assert not list(answers)
    assert tasks_record._chosen([], accept=False) == []


FORM = "/home/user/shop.form"


def form(x: int, y: int) -> list[Any]:
    """Return a setup that opens a form at a place of the screen."""
    colours = {"face": [236, 236, 232], "ink": [30, 30, 34], "accent": [60, 110, 180]}
    widgets = [
        {"kind": "field", "name": "item", "x": 10, "y": 40, "w": 200, "h": 40},
        {"kind": "button", "name": "add", "x": 10, "y": 100, "w": 100, "h": 40},
    ]
    content = {"title": "Shop", "x": x, "y": y, "w": 300, "h": 200, **colours, "widgets": widgets}
    return [
        {"kind": "write_file", "path": FORM, "text": json.dumps(content)},
        {"kind": "launch", "argv": ["form", FORM], "window": {"title": "^Shop$"}},
    ]


def test_a_recorded_oracle_finds_its_widgets_where_the_window_is_elsewhere(tmp_path: Path) -> None:
    script = [[{"click": {"x": 330, "y": 180}}, {"type": "eggs"}], [{"click": {"x": 350, "y": 240}}]]
    status, text = record(tmp_path, script, setup=form(300, 120))
    assert status == 0, text
    content = yaml.safe_load((tmp_path / "shop-add.yaml").read_text())
    (task,) = content["tasks"]
    assert task["oracle"][1] == [
        {
            "click": {
                **{"x": 350, "y": 240},
                "target": {"window": "^Shop$", "role": "push-button", "name": "add", "x": 40, "y": 20},
            }
        }
    ]
    absolute = {**task, "name": "absolute", "oracle": [*script, ["done"]]}
    content["tasks"] = [{**each, "setup": form(80, 400)} for each in (task, absolute)]
    moved = tmp_path / "moved.yaml"
    moved.write_text(yaml.safe_dump(content))
    words = ("--tasks", str(moved), "--hypervisor", "fake", "--state-dir", str(tmp_path / "state"), "--json")
    report = json.loads(run_envd("tasks", "verify", "shop/", *words).out)
    assert [(each["task_id"], each["policy"]) for each in report["failures"]] == [("shop/absolute", "oracle")]
    assert (report["oracle_ok"], report["null_ok"]) == (1, 2)


#: What a page sends for a double click, a drag, text and a turned wheel, over the editor and the controls.
SENT: tuple[Action, ...] = (
    *(Click(300, 200), Click(300, 200), TypeText("a"), TypeText("b"), Click(300, 200)),
    *(MouseDown(x=100, y=55), Move(150, 90), MouseUp(x=160, y=100)),
    *(Scroll(dy=1, x=300, y=250), Scroll(dy=2, x=300, y=250)),
    *(Click(700, 600, count=2), Click(822, 167)),
)


async def test_what_a_person_presses_is_recorded_with_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    async def counted(episode: AsyncEpisode, *, os: GuestOs) -> GuestScreen:
        nonlocal looks
        looks += 1
        return await read_screen(episode, os=os)

    monkeypatch.setattr("envd.authoring.targets.read_screen", counted)
    async with served_client(size=1) as (server, client), client.reset("fake/enable") as episode:
        service, recorder = server.service, TargetRecorder(episode, os=GuestOs.LINUX)
        found = service.find(episode.episode_id)
        assert found is not None
        found.machine.desktop.before_act = recorder.before_act
        service.take_control(episode.episode_id, control_id="page", holder="")
        for action in SENT:
            await service.act(episode.episode_id, control_id="page", actions=[action])
        await service.release_control(episode.episode_id, control_id="page")
        recorded = [recorder.aimed(action) for action in merged(SENT)]
    # Neither between the clicks of a double click nor within a drag, which the wait would break.
    assert looks == 7
    title = r"note\.txt - Editor$"
    text = Target(window=f"^{title}", role="text", name="Text", x=259, y=96)
    edited = rf"^\*{title}"
    dragged, dropped = Target(window=edited, x=60, y=15), Target(window=edited, x=120, y=60)
    assert recorded == [
        Aimed(Click(300, 200, count=2), text),
        TypeText("ab"),
        Aimed(Click(300, 200), text.model_copy(update={"window": edited})),
        # Both ends of a drag are relative to what was there before it.
        Aimed(Drag(start_x=100, start_y=55, end_x=160, end_y=100), dragged, dropped),
        Aimed(Scroll(dy=3, x=300, y=250), Target(window=edited, x=200, y=165)),
        Click(700, 600, count=2),
        Aimed(Click(822, 167), Target(window="^Controls$", role="check-box", name="Enabled", x=48, y=9)),
    ]


async def test_an_action_without_its_target_on_the_screen_uses_its_coordinates() -> None:
    played: list[Action] = []
    steps: list[tuple[OracleAction, ...]] = [
        (Aimed(Click(822, 167), Target(window="^Nothing$", x=5, y=5)),),
        (TypeText("a"), Aimed(Click(1, 1), Target(role="check-box", name="Enabled", x=3, y=4)), TypeText("b")),
    ]
    view = View(a11y_elements=True)
    async with served_client(size=1) as (_, client), client.reset("fake/enable", view=view) as episode:
        await play(episode, steps, runs_guests=False, on_step=lambda actions, _result: played.extend(actions))
        (box,) = [each.box for each in episode.observation.a11y_elements or () if each.name == "Enabled"]
        assert played == [Click(822, 167), TypeText("a"), Click(box[0] + 3, box[1] + 4), TypeText("b")]
        assert episode.step_count == 3
