"""The daemons that `trainer learn` starts, and what a killed run leaves of them."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cuaenv.client import AsyncEnvClient, Task
from envd.cli.options import load_config
from tests.support.command import run_envd
from trainer.data.oracles import read_oracles
from trainer.learn import LearnError, daemons, demos
from trainer.learn.daemons import print_oracles, started_daemons
from trainer.learn.settings import SMOKE

DRAWN = ("--hypervisor", "fake")
START = """\
import sys, time
from pathlib import Path
from trainer.learn.daemons import started_daemons
from trainer.learn.settings import SMOKE
with started_daemons(Path(sys.argv[1]), SMOKE) as addresses:
    print(*addresses, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def printed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print oracles in this process, which saves 2 s for each program; tests/unit/test_own_subprocesses.py runs one."""
    monkeypatch.setattr(daemons, "_printed", lambda *words: run_envd("tasks", "oracles", *words, *DRAWN).out)


@pytest.mark.long
def test_a_run_that_was_killed_can_be_started_again_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        addresses = run.stdout.readline().split()
        assert addresses
        run.kill()
    with started_daemons(tmp_path, SMOKE) as again:
        assert len(again) == len(addresses)
        for address in again:
            with grpc.insecure_channel(address) as channel:
                grpc.channel_ready_future(channel).result(timeout=30)


@pytest.mark.long
@pytest.mark.parametrize("suite", ["drawn", "desktop"])
def test_oracles_are_printed_for_suites_of_drawn_and_of_real_desktops(suite: str, tmp_path: Path) -> None:
    print_oracles(tmp_path / "oracles.jsonl", suite=suite, seeds=range(2))
    tasks = {oracle.task_id for oracle in read_oracles(tmp_path / "oracles.jsonl")}
    assert any(task.endswith("?seed=1") for task in tasks)
    assert {task.partition("/")[0] for task in tasks} == {suite}


@pytest.mark.usefixtures("printed_here")
def test_variants_are_played_without_listing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[object] = []
    list_tasks = AsyncEnvClient.list_tasks

    async def noted(self: AsyncEnvClient, **options: Any) -> list[Task]:
        listed.append(options.get("task_ids", ()))
        return await list_tasks(self, **options)

    monkeypatch.setattr(AsyncEnvClient, "list_tasks", noted)
    ids = ["drawn/press?seed=1", "drawn/press?seed=2", "drawn/none?seed=1"]
    print_oracles(tmp_path / "oracles.jsonl", suite="drawn", seeds=range(1, 3), templates=["drawn/press"])
    known = {oracle.task_id: oracle for oracle in read_oracles(tmp_path / "oracles.jsonl")}
    oracles = [(replace(known[ids[0]] if each not in known else known[each], task_id=each), 0) for each in ids]
    with started_daemons(tmp_path, SMOKE) as addresses:
        failures = asyncio.run(demos._play_all(SMOKE, addresses[0], oracles, tmp_path / "part"))
    assert failures == [f"drawn/none?seed=1: {addresses[0]} does not serve it"]
    rows = [json.loads(line) for line in (tmp_path / "part.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["task"] for row in rows} == set(ids[:2])
    assert listed == [()]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("printed_here")
def test_of_held_out_templates_no_variant_is_printed_and_of_the_others_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By two commands, with one seed each, one after the other: they write to the output of this process.
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("trainer.learn.daemons._ORACLES_AT_ONCE", 1)
    print_oracles(tmp_path / "oracles.jsonl", suite="drawn", seeds=range(2))
    lines = lines_of(tmp_path / "oracles.jsonl")
    variants = [line["task_id"] for line in lines if "?" in line["task_id"]]
    train = {line["task_id"].partition("?")[0] for line in lines if line["split"] == "train"}
    assert sorted(variants) == sorted(f"{template}?seed={seed}" for template in train for seed in range(2))
    assert {line["split"] for line in lines if line["task_id"] not in variants} == {"held_out"}


def test_own_daemons_do_not_limit_the_rate_of_their_only_client_nor_wait_for_its_episodes(tmp_path: Path) -> None:
    with started_daemons(tmp_path, SMOKE) as addresses:
        assert addresses
        config = load_config(tmp_path / "envd.toml", {})
        assert (config.security.calls_per_second, config.limits.drain_timeout_s) == (0, 0)


@pytest.mark.long
def test_of_other_templates_only_the_split_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "oracles.jsonl"
    print_oracles(file, suite="drawn", seeds=range(3), templates=["drawn/press"])
    lines = lines_of(file)
    variants = [line["task_id"] for line in lines if "?" in line["task_id"]]
    assert variants == [f"drawn/press?seed={seed}" for seed in range(3)]
    others = {line["task_id"]: line["split"] for line in lines if "?" not in line["task_id"]}
    assert "drawn/press" not in others
    assert set(others.values()) == {"train", "held_out"}
    with pytest.raises(LearnError, match="'drawn/none' not found"):
        print_oracles(file, suite="drawn", seeds=range(3), templates=["drawn/none"])


@pytest.mark.long
def test_a_suite_without_oracles_is_named(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="drawing: no task of it has an oracle"):
        print_oracles(tmp_path / "oracles.jsonl", suite="drawing", seeds=range(2))
    assert not (tmp_path / "oracles.jsonl").exists()
