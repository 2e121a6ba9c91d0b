"""The demo's group, settings, report and files."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from cuaenv.actions import Done, TypeText
from cuaenv.client import Check
from envd.authoring.demo.group import members_for
from envd.authoring.demo.report import (
    DemoEpisode,
    DemoReport,
    StepRecord,
    clear,
    write_animation,
    write_frame,
    write_picture,
    write_report,
)
from envd.base.config_sources import load
from envd.bench.default_tasks import DEFAULT_TASKS
from envd.cli.demo import demo_config
from envd.daemon.suites import load_tasks


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(buffer, "PNG")
    return buffer.getvalue()


def episode(policy: str, *, expected: float, reward: float, parent: str = "", frame_id: str = "0" * 32) -> DemoEpisode:
    return DemoEpisode(
        policy=policy,
        description=f"is {policy}",
        expected_reward=expected,
        episode_id=f"ep-{policy}",
        parent_episode_id=parent,
        template_digest="t",
        state="terminated",
        end_reason="AGENT_DONE",
        reward=reward,
        checks=(Check(name="file", score=reward, evidence="found"),),
        evaluate_timings_ms={"total": 1.0},
        steps=(
            StepRecord(actions=(), errors=(), frame=f"{policy}-00.png", frame_id=frame_id, settled=True, timings_ms={}),
        ),
    )


def report(*episodes: DemoEpisode) -> DemoReport:
    return DemoReport(
        task_id="desktop/x",
        instruction="do x",
        image="desktop",
        accelerator="tcg",
        hypervisor="libvirt",
        timings_s={"image": 0.0},
        reset_timings_ms={"total": 1.0},
        episodes=episodes,
    )


ORACLE = episode("oracle", expected=1.0, reward=1.0)
NULL = episode("null", expected=0.0, reward=0.0)


@pytest.mark.parametrize("flags", [{}, {"hypervisor.uri": "fake"}])
def test_the_default_task_exists_and_its_oracle_types_text(flags: dict[str, object]) -> None:
    task = load_tasks(load(flags=flags)).get(DEFAULT_TASKS["fake" if flags else "desktop"].demo)
    members = {member.name: member for member in members_for(task)}
    assert any(isinstance(action, TypeText) for step in members["oracle"].steps for action in step)
    assert {type(action) for step in members["null"].steps for action in step} == {Done}
    branched = [member for member in members.values() if member.branch is not None]
    assert len(branched) == 2
    for member in branched:
        assert member.branch is not None
        assert 0 < member.branch_at < len(task.oracle)
        assert member.steps[: member.branch_at] == task.oracle[: member.branch_at]
        assert {member.expected_reward, member.branch.expected_reward} == {0.0, 1.0}


def test_a_demo_has_capacity_for_group_and_branches_free_ports_and_its_own_state(tmp_path: Path) -> None:
    served = load(
        flags={
            "state_dir": tmp_path,
            "listen": "127.0.0.1:50051",
            "hypervisor.uri": "qemu:///embed?root=/srv/served",
            "pools": {"desktop": {"size": 8, "memory_mib": 2048}, "win": {"size": 1}},
        }
    )
    own = demo_config(served)
    assert (own.listen, own.metrics_listen, own.state_dir) == ("127.0.0.1:0", "127.0.0.1:0", tmp_path / "demo")
    assert own.hypervisor.uri == ""
    assert own.template_dir == served.template_dir
    assert own.pools.keys() == {"desktop"}
    assert (own.pools["desktop"].capacity, own.pools["desktop"].memory_mib) == (7, 2048)


def test_a_demo_passes_with_every_reward_and_frame_as_expected() -> None:
    assert report(ORACLE, NULL).passed
    half = report(ORACLE, episode("null", expected=0.0, reward=0.5))
    assert half.problems == ("null got reward 0.5, expected 0",)
    assert not half.passed
    assert not report(episode("oracle", expected=1.0, reward=0.0), NULL).passed
    assert not report().passed
    other = episode("null", expected=0.0, reward=0.0, frame_id="1" * 32)
    assert not report(ORACLE, other).passed
    branch = episode("branch", expected=0.0, reward=0.0, parent="ep-oracle", frame_id="1" * 32)
    assert report(ORACLE, NULL, branch).passed
    branch = episode("branch", expected=0.0, reward=0.0, parent="ep-oracle")
    assert report(ORACLE, branch).problems == ("a branch ended with the same frame as its parent",)
    assert episode("null", expected=0.0, reward=0.5).verdict == "reward 0.5, not 0"


def test_the_picture_shows_every_episode_with_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, colour in (("oracle", "red"), ("null", "blue"), ("branch", "lime")):
        write_frame(tmp_path, f"{name}-00", png(colour))
    branch = episode("branch", expected=0.0, reward=0.0, parent="ep-oracle")
    drawn: list[str] = []
    draw = ImageDraw.ImageDraw.text

    def noted(self: ImageDraw.ImageDraw, at: tuple[float, float], text: str, **more: Any) -> None:
        drawn.append(text)
        draw(self, at, text, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noted)
    with Image.open(tmp_path / write_picture(tmp_path, "group", report(ORACLE, NULL, branch))) as picture:
        colours = {colour for _, colour in picture.getcolors(1 << 24) or []}
    assert {(255, 0, 0), (0, 0, 255), (0, 255, 0)} <= colours
    assert {"oracle", "reward 1", "member of the group: is null", "branch of oracle: is branch"} <= set(drawn)


def test_the_directory_contains_frames_an_animation_and_the_report(tmp_path: Path) -> None:
    directory = tmp_path / "out" / "demo"
    clear(directory)
    frames = [
        write_frame(directory, f"oracle-{i:02}", png(colour)) for i, colour in enumerate(("red", "green", "blue"))
    ]
    assert frames == ["oracle-00.png", "oracle-01.png", "oracle-02.png"]
    with Image.open(directory / write_animation(directory, "oracle", frames)) as animation:
        assert animation.format == "GIF"
        assert getattr(animation, "n_frames", 1) == 3
        assert animation.size == (64, 48)
    write_report(directory, report(ORACLE, NULL))
    written = json.loads((directory / "episode.json").read_text(encoding="utf-8"))
    assert written["passed"] is True
    assert [(one["policy"], one["reward"]) for one in written["episodes"]] == [("oracle", 1.0), ("null", 0.0)]


def test_a_new_demo_removes_only_the_files_of_the_last_one(tmp_path: Path) -> None:
    write_frame(tmp_path, "oracle-07", png("red"))
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    clear(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
