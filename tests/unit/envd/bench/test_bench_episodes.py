"""`envd bench episodes`: its report, and the peer's program with a stand-in for OSWorld's package."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envd.authoring.parity.playing import PlannedScript, PlayedScript, parity_config, stored_screen
from envd.authoring.parity.scripts import ParityScript
from envd.base.config_sources import load
from envd.base.errors import ConfigError
from envd.bench import episodes_peer, parity_peer
from envd.bench.episodes import (
    EpisodesPlan,
    Side,
    episodes_report,
    process_tree,
    pyautogui_calls,
    require_osworld,
    tree_cpu_s,
    tree_pss_bytes,
)
from envd.bench.episodes_peer import PeerEpisode, PlayedEpisode, play_as_peer
from envd.bench.parity_peer import play_side_in_desktop_env
from envd.bench.report import BenchFailed
from envd.bench.session import BenchSession, Steps, bench_config, open_bench
from envd.cli.own_daemon import run_until_signal
from envd.tasks.model import Task
from tests.support.command import run_envd

#: The part of OSWorld's `DesktopEnv` that the program uses. Every screenshot is another one; the third action crashes.
DESKTOP_ENV = """
import types, urllib.request

create_vm_manager_and_provider = None

class DesktopEnv:
    def __init__(self, *, provider_name, screen_size, **_):
        print("noise on standard output")
        self.manager, self.provider = create_vm_manager_and_provider(provider_name, None)
        self.path, self.used, self.shots = self.manager.get_vm_path(), False, 0
        self._start()

    def _start(self):
        self.provider.start_emulator(self.path, False, "Ubuntu")
        host, port, *_ = self.provider.get_ip_address(self.path).split(":")
        self.url = f"http://{host}:{port}"

    def _get_obs(self):
        self.shots += 1
        png = urllib.request.urlopen(self.url + "/screenshot").read()
        return {"screenshot": png + bytes([self.shots])}

    def reset(self, task_config):
        if self.used:
            self.provider.revert_to_snapshot(self.path, "init_state")
            self._start()
        self.used, self.task, self.actions = True, task_config, []
        return self._get_obs()

    def step(self, action, pause):
        self.actions.append(action)
        if action == "crash":
            raise RuntimeError("the guest is gone")
        return self._get_obs(), 0, action == "DONE", {}

    def evaluate(self):
        return self.actions == self.task["expected"]

    def close(self):
        self.provider.stop_emulator(self.path)
"""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes_peer, "RESET_PAUSE_S", 0.0)
    monkeypatch.setattr(episodes_peer, "EVALUATE_PAUSE_S", 0.0)
    monkeypatch.setattr(parity_peer, "STEP_PAUSE_S", 0.0)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return a program that runs Python with the stand-in, whatever its first argument."""
    package = tmp_path / "packages" / "desktop_env"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "desktop_env.py").write_text(DESKTOP_ENV)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def play(tmp_path: Path, python: Path, episodes: list[PeerEpisode]) -> tuple[list[PlayedEpisode], int]:
    """Play on drawn desktops; return the episodes and how often one was reported."""
    settings = load(flags={"hypervisor.uri": "fake", "state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache"})
    reported: list[None] = []

    async def run() -> list[PlayedEpisode]:
        steps = Steps(lambda _stage, _share: None, 1)
        async with open_bench(bench_config(settings, standby_count=1, capacity=1), steps=steps) as bench:
            try:
                return await play_as_peer(
                    bench, python, episodes, think_s=0, step_pause_s=0, on_episode=lambda: reported.append(None)
                )
            finally:
                assert machine_ids(bench) == [record for record in machine_ids(bench) if "bench-" not in record]

    return run_until_signal(run()), len(reported)


def machine_ids(bench: BenchSession) -> list[str]:
    hypervisor = bench.daemon.hypervisor
    assert hasattr(hypervisor, "machines")
    return list(hypervisor.machines)


def test_the_peer_plays_each_episode_on_a_new_machine(tmp_path: Path, python: Path) -> None:
    calls = pyautogui_calls("true")
    tasks: list[dict[str, Any]] = [{"expected": calls}, {"expected": []}]
    played, reported_count = play(tmp_path, python, [PeerEpisode(task=task, actions=calls) for task in tasks])
    assert [episode.score for episode in played] == [1.0, 0.0]
    assert [len(episode.steps_s) for episode in played] == [4, 4]
    assert reported_count == 2


def test_a_peer_that_crashes_fails_the_run_with_its_error(tmp_path: Path, python: Path) -> None:
    episode = PeerEpisode(task={"expected": []}, actions=["crash"])
    with pytest.raises(BenchFailed, match=r"0 of 1 episodes(?s:.*)the guest is gone"):
        play(tmp_path, python, [episode])


def test_osworlds_environment_is_a_side_of_a_comparison(tmp_path: Path, python: Path) -> None:
    """A script that crashes it is void, and the others are played."""
    tasks = tmp_path / "examples" / "os"
    tasks.mkdir(parents=True)
    (tasks / "one.json").write_text(json.dumps({"expected": ["DONE"]}))
    task = Task.model_validate({"task_id": "osworld/one", "instruction": "i", "level": 1, "infeasible": True})
    scripts = [ParityScript(name="trajectory a", calls=["crash"]), ParityScript(name="nothing")]
    planned = [PlannedScript(task=task, script=each, digest=each.name) for each in scripts]
    settings = load(flags={"hypervisor.uri": "fake", "state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache"})
    config = parity_config(settings, parallel_count=1, script_count=1)
    screens = tmp_path / "screens"
    results: list[PlayedScript] = []
    run_until_signal(
        play_side_in_desktop_env(
            config,
            planned,
            python=python,
            tasks=tmp_path,
            side="right",
            screens=screens,
            parallel_count=2,
            on_result=results.append,
        )
    )
    nothing, crashed = sorted(results, key=lambda each: each.script)
    assert (crashed.side, crashed.score, crashed.screens) == ("right", None, ())
    assert "the guest is gone" in crashed.detail
    assert (nothing.score, nothing.script) == (1.0, "nothing")
    first, last = (stored_screen(screens, name) for name in nothing.screens)
    assert first[:-1] == last[:-1]
    assert first.startswith(b"\x89PNG")


def side(score: float, *, elapsed_s: float) -> Side:
    episode = PlayedEpisode(score=score, reset_s=2.0, steps_s=[0.5, 1.5], evaluate_s=3.0)
    return Side(episodes=[episode, episode], elapsed_s=elapsed_s, cpu_s=10.0, memory_bytes=4 << 20)


def test_both_sides_are_compared_per_hour_and_per_episode() -> None:
    report = episodes_report({}, side(1.0, elapsed_s=20.0), side(1.0, elapsed_s=200.0), concurrency=2)
    found = {figure.name: figure.value for figure in report.figures}
    assert (found["episodes_per_hour"], found["peer_episodes_per_hour"], found["ratio"]) == (360.0, 36.0, 10.0)
    assert (found["step_s_p50"], found["step_s_p99"], found["peer_evaluate_s_p50"]) == (1.0, 1.5, 3.0)
    assert (found["memory_mib_per_episode"], found["peer_cpu_s_per_episode"]) == (2.0, 5.0)
    assert report.passed


@pytest.mark.parametrize(("ours", "peer"), [(0.0, 1.0), (1.0, 0.0)])
def test_an_unsolved_episode_fails_the_run(ours: float, peer: float) -> None:
    report = episodes_report({}, side(ours, elapsed_s=1.0), side(peer, elapsed_s=1.0), concurrency=1)
    assert [check.passed for check in report.checks] == [ours == 1.0, peer == 1.0]


def test_episodes_are_rounded_up_to_whole_groups() -> None:
    plan = EpisodesPlan(concurrency=4, episode_count=9, peer_episode_count=1, think_s=2.0, peer_step_pause_s=2.0)
    assert (plan.group_count, plan.peer_turn_count, plan.step_count) == (3, 1, 16)


def test_the_tree_of_processes_includes_children_of_children() -> None:
    script = "sleep 1000 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        grandchild = int(shell.stdout.readline())
        pids = [pid for pid, _ in process_tree()]
        os.kill(grandchild, signal.SIGKILL)
    assert {os.getpid(), shell.pid, grandchild} <= set(pids)
    assert os.getppid() not in pids
    assert min(tree_cpu_s(), tree_pss_bytes()) > 0


def test_osworld_must_be_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run envd osworld install"):
        require_osworld(tmp_path)


def test_drawn_desktops_are_refused() -> None:
    refused = run_envd("bench", "episodes", "--hypervisor", "fake")
    assert refused.status == 2
    assert "drawn desktops run no guests" in refused.err
