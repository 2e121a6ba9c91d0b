"""The benchmarks' reports, and their commands on fake desktops."""

import json
import os
import signal
import sqlite3
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from cuaenv.actions import Click, Drag, Move, PressKeys
from envd.base.config import Config, HypervisorConfig
from envd.base.config_sources import load
from envd.base.errors import GuestUnresponsive
from envd.base.store.store import FILE_NAME
from envd.bench.branch import branch_report, measure_branch
from envd.bench.branch_parents import WritingParent, check_branch
from envd.bench.fork import NO_MEMORY, fork_report, memory_figures
from envd.bench.load import load_processes, opened_count, run_phase
from envd.bench.load_client import LoadPlan, LoadResult, echo_server
from envd.bench.report import BenchReport, Condition, Figure, Value, percentile
from envd.bench.scale import scale_configs, scale_report
from envd.bench.scale_daemon import LAG_INTERVAL_S
from envd.bench.session import BenchSession, Steps, bench_config, open_bench
from envd.bench.step import PEER_PAUSE_S, script, step_report, xdotool_command
from envd.cli.bench import report_measures
from envd.cli.own_daemon import run_until_signal
from envd.drawn import fake_image
from envd.hypervisor.machine import GuestOs
from envd.hypervisor.qemu.processes import memory_of, written_guest_bytes
from envd.pool.pool import MachinePool
from envd.pool.room import HostRoom
from envd.pool.settings import PoolHost, PoolParameters
from tests.support.command import CommandOutput, run_envd
from tests.support.faulty import FaultyHypervisor
from tests.support.served import EnvdProgram

MIB = 1 << 20
REAL: dict[str, object] = {"accelerator": "tcg", "machines": 8, "guest_memory_mib": 1024}
FAKE: dict[str, object] = {**REAL, "accelerator": "fake"}
PASSED = Condition(name="branch", passed=True, evidence="it was")


def verdicts(report: BenchReport) -> dict[str, bool | None]:
    return {target.name: target.met for target in report.targets}


def results(report: BenchReport) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in report.figures}


def fork_found(conditions: dict[str, object], *, memory: Mapping[str, Value] = NO_MEMORY) -> BenchReport:
    return fork_report(
        conditions,
        cold_boot_s=40.0,
        acquire_ms=[50.0, 4.0, 4.0],
        fork_ms=[300.0, 310.0, 900.0],
        destroy_ms=[1.0, 2.0, 3.0],
        resume_ms=[0.1, 0.2, 0.3],
        pause_ms=[0.4, 0.5, 0.6],
        forks_per_min=(30.0, 50.0),
        memory=memory,
    )


# -- deciding ---------------------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "report"
    file.touch()
    done = run_envd("bench", "report", "--hypervisor", "fake", "--out", str(file), "--state-dir", str(tmp_path))
    assert (done.status, "bench report:" in done.err) == (2, False)
    assert f"error: --out {file}: cannot be written: File exists" in done.err


def test_a_report_has_the_benchmarks_that_its_backend_can_run() -> None:
    def names(uri: str) -> set[str]:
        return set(report_measures(Config(hypervisor=HypervisorConfig(uri=uri)), 0.0))

    copies = {"branch", "checkpoint", "parked"}
    assert names("") >= copies | {"fork", "step", "scale", "settle", "episodes"}
    assert names("oci:") == names("") - copies
    assert names("fake") == names("") - {"episodes"}


def test_a_percentile_is_the_least_sample_that_so_many_of_100_do_not_exceed() -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], 95) == 95.0
    assert percentile([float(n) for n in range(1, 21)], 95) == 19.0
    assert percentile([float(n) for n in range(200, 0, -1)], 99) == 198.0
    assert (percentile([3.0, 1.0], 99), percentile([3.0, 1.0], 50), percentile([], 50)) == (3.0, 2.0, None)


def test_a_target_is_met_missed_or_does_not_apply() -> None:
    figure = Figure(name="x", value=20.0, meaning="", target="<= 20")
    assert figure.met is True
    assert replace(figure, target="< 20").met is False
    assert replace(figure, value=20.1).met is False
    assert replace(figure, value=1000.0, target=">= 1000").met is True
    assert replace(figure, value=None).met is None
    assert replace(figure, exempt="no guest runs").met is None
    assert replace(figure, target="").met is None
    report = BenchReport(benchmark="x", conditions={}, figures=[figure, replace(figure, name="y", target="")])
    assert report.as_json()["targets"] == {"x": {"met": True, "value": 20.0, "target": "<= 20"}}


def test_forks_are_compared_by_medians_and_memory_includes_the_growth_of_the_daemon() -> None:
    memory = memory_figures(
        pss_bytes=140.0 * MIB,
        private_dirty_bytes=90.0 * MIB,
        standby_pss_bytes=50.0 * MIB,
        daemon_growth_bytes=11.0 * MIB,
    )
    report = fork_found(REAL, memory=memory)
    found = results(report)
    assert found["cold_boot_over_acquire"] == pytest.approx(10_000)
    assert found["marginal_pss_mib"] == pytest.approx(151)
    assert verdicts(report) == {"acquire_ms_p50": True, "cold_boot_over_acquire": True, "marginal_pss_mib": False}


def test_targets_do_not_apply_to_other_loads() -> None:
    memory = memory_figures(pss_bytes=MIB, private_dirty_bytes=MIB, standby_pss_bytes=MIB, daemon_growth_bytes=0)
    four = {target.name: target for target in fork_found({**REAL, "machines": 4}, memory=memory).targets}
    assert four["marginal_pss_mib"].exempt == "machines is 4, not 8"
    assert set(verdicts(fork_found(FAKE)).values()) == {None}


GROUPS = {**REAL, "group_size": 8}


def test_targets_do_not_apply_to_a_branch_with_more_dirty_memory() -> None:
    small = {"branch_ms": 119, "parent_pause_ms": 26, "copy_ms": 40, "start_ms": 50, "other_ms": 50, "dirty_mib": 32}
    large = {**small, "dirty_mib": 40}
    report = branch_report(GROUPS, light=[small], worked=[large], group_ms=[599.0], who="an editor", check=PASSED)
    assert verdicts(report) == {
        "light_branch_ms_p50": True,
        "light_parent_pause_ms_p50": False,
        "branch_ms_p50": None,
        "parent_pause_ms_p50": None,
        "group_first_frames_ms_p50": True,
    }
    other = branch_report(
        {**GROUPS, "group_size": 2}, light=[small], worked=[small], group_ms=[1.0], who="an editor", check=PASSED
    )
    assert verdicts(other)["group_first_frames_ms_p50"] is None, "the target is for groups of 8"
    assert results(report)["other_ms_p50"] == 50


def scale_found(
    *, machine_count: int = 256, opened_count: int = 256, keyframe_count: int = 0, p99_ms: float = 200.0
) -> BenchReport:
    latencies_ms = [p99_ms] * 20 + [100.0] * 980
    return scale_report(
        {**FAKE, "machine_count": machine_count},
        stepped=LoadResult(call_count=1000, elapsed_s=2.0, latencies_ms=latencies_ms, keyframe_count=keyframe_count),
        bare=LoadResult(call_count=4000, elapsed_s=4.0, latencies_ms=[1.0]),
        opened_count=opened_count,
        server_cpu_s=1.5,
        lags_ms=[1.0] * 95 + [30.0] * 5,
    )


def test_steps_are_compared_with_bare_calls_of_the_same_run() -> None:
    report = scale_found()
    found = results(report)
    assert (found["steps_per_s"], found["bare_rpc_per_s"], found["steps_share"]) == (500.0, 1000.0, 0.5)
    assert (found["p50_ms"], found["p99_ms"], found["server_cpu_ms_per_step"]) == (100.0, 200.0, 1.5)
    assert verdicts(report) == {"steps_share": True, "p99_ms": True, "loop_lag_ms_p99": False}
    assert verdicts(scale_found(p99_ms=300.0))["p99_ms"] is False
    assert set(verdicts(scale_found(machine_count=64, opened_count=64)).values()) == {None}
    assert report.passed


def test_clients_without_episodes_and_keyframes_fail_the_run() -> None:
    assert not scale_found(opened_count=255).passed
    assert not scale_found(keyframe_count=1).passed


def test_the_meanings_of_figures_name_the_programs_constants() -> None:
    figures = (*step_report(FAKE, [STEP], []).figures, *scale_found().figures)
    meanings = {figure.name: figure.meaning for figure in figures}
    assert f"a pause of {PEER_PAUSE_S:g} s" in meanings["peer_step_ms_p50"]
    assert f"sleeps for {LAG_INTERVAL_S * 1000:g} ms" in meanings["loop_lag_ms_p99"]


STEP = {
    "step": 330.0,
    "input": 20.0,
    "settle": 306.0,
    "resume": 1.0,
    "observe": 0.5,
    "daemon": 329.0,
    "rebuild": 1.0,
    "frame_kib": 1.0,
}
PEER = {"step": 2930.0, "input": 300.0, "screenshot": 600.0, "decode": 30.0}


def test_the_overhead_of_a_step_excludes_input_and_settling() -> None:
    slow = {**STEP, "step": 350.0, "daemon": 349.0}
    report = step_report(REAL, [*[STEP] * 98, slow, slow], [PEER])
    found = results(report)
    assert found["overhead_ms_p50"] == pytest.approx(4.0)
    assert found["overhead_ms_p99"] == pytest.approx(24.0)
    assert found["pause_ms_p50"] == pytest.approx(1.5)
    assert found["wire_ms_p50"] == pytest.approx(1.0)
    assert found["peer_step_ms_p50"] == pytest.approx(2930.0)
    assert found["peer_over_step"] == pytest.approx(2930 / 331)
    assert verdicts(report) == {"overhead_ms_p50": True, "overhead_ms_p99": False}
    fake = step_report(FAKE, [STEP], [])
    assert results(fake)["peer_step_ms_p50"] is None
    assert results(fake)["peer_over_step"] is None
    assert set(verdicts(fake).values()) == {None}


def test_peers_play_the_same_script_with_xdotool() -> None:
    played = script(4)
    assert [type(action) for action in played] == [Click, PressKeys, Move, Click]
    assert played[0] != played[3]
    assert [xdotool_command(action) for action in played[:3]] == [
        ["xdotool", "mousemove", "220", "220", "click", "1"],
        ["xdotool", "key", "a"],
        ["xdotool", "mousemove", "310", "280"],
    ]
    with pytest.raises(ValueError, match="not an action of the script"):
        xdotool_command(Drag(end_x=1, end_y=1))


def checked(
    *,
    child_frame_id: str = "f1",
    later_frame_id: str = "f1",
    parent_file: tuple[str, str] = ("", ""),
    child: str = "text and child",
    parent: str = "text and parent",
) -> Condition:
    return check_branch(
        parent_frame_ids=("f1", later_frame_id),
        child_frame_id=child_frame_id,
        parent_file=parent_file,
        child_saved=("text and child", child),
        parent_saved=("text and parent", parent),
    )


def test_a_branch_is_correct_if_the_child_continues_and_the_parent_is_unchanged() -> None:
    assert checked().passed
    for wrong, problem in (
        (checked(child_frame_id="f2"), "the child's first frame was f2"),
        (checked(later_frame_id="f2"), "the parent's frame was f1, but f2 after"),
        (checked(parent_file=("", "text and child")), "the parent's file was ''"),
        (checked(child="and child"), "the child saved 'and child', not 'text and child'"),
        (checked(parent="text and child and parent"), "the parent saved 'text and child and parent'"),
    ):
        assert not wrong.passed
        assert problem in wrong.evidence


def test_a_failed_check_fails_the_report_and_a_missed_target_does_not() -> None:
    slow = {"branch_ms": 5000, "parent_pause_ms": 500, "copy_ms": 1, "start_ms": 1, "other_ms": 4998, "dirty_mib": 1}
    report = branch_report(GROUPS, light=[slow], worked=[slow], group_ms=[5000.0], who="an editor", check=PASSED)
    assert set(verdicts(report).values()) == {False}
    assert report.passed
    assert not replace(report, checks=(replace(PASSED, passed=False),)).passed


def test_a_benchmark_has_one_pool_free_ports_and_its_own_state(tmp_path: Path) -> None:
    served = load(
        flags={
            "state_dir": tmp_path,
            "listen": "127.0.0.1:50051",
            "hypervisor.uri": "qemu:///embed?root=/srv/served",
            "pools": {"desktop": {"size": 8, "memory_mib": 2048, "always_running": True}, "win": {"size": 1}},
        }
    )
    own = bench_config(served, standby_count=4, capacity=5)
    assert (own.listen, own.metrics_listen, own.state_dir) == ("127.0.0.1:0", "127.0.0.1:0", tmp_path / "bench")
    assert own.hypervisor.uri == ""
    assert own.pools.keys() == {"desktop"}
    other = bench_config(served, standby_count=1, capacity=1, image="win").pools["desktop"]
    assert (other.image, other.memory_mib, other.capacity) == ("win", 1024, 1)
    pool = own.pools["desktop"]
    assert (pool.size, pool.capacity, pool.memory_mib) == (4, 5, 2048)
    assert pool.allow_guest_access
    assert not pool.always_running


# -- measuring --------------------------------------------------------------------------------------------------


def test_a_process_is_measured_by_its_memory() -> None:
    own = os.getpid()
    assert 0 < memory_of(own).private_dirty_bytes <= memory_of(own).pss_bytes
    assert written_guest_bytes(own) == 0


def run(*args: str) -> CommandOutput:
    return run_envd("bench", *args, "--hypervisor", "fake")


@pytest.mark.long
def test_bench_fork_measures_fake_desktops_and_reports_that_no_guest_ran(tmp_path: Path) -> None:
    done = run("fork", "--n", "2", "--repetitions", "2", "--json", "--state-dir", str(tmp_path))
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["conditions"]["accelerator"] == "fake"
    assert report["conditions"]["repetitions"] == 2
    assert len(report["samples"]["acquire_ms"]) == 2
    target = report["targets"]["cold_boot_over_acquire"]
    assert (target["met"], target["unless"]) == (None, "fake desktops: no guest runs")
    assert "bench fork" in done.err


@pytest.mark.long
def test_bench_branch_measures_and_checks_fake_desktops_and_prints_tables(tmp_path: Path) -> None:
    done = run("branch", "--repetitions", "2", "--state-dir", str(tmp_path))
    assert done.status == 0, done.err
    assert "branch_ms_p50" in done.out
    assert "passed a child continues its parent's text" in done.out
    assert "milk\\nbread\\n-2 -1 0 1 and the child" in done.out


@pytest.mark.long
def test_bench_branch_compares_the_files_of_a_guest_whose_programs_are_unknown(tmp_path: Path) -> None:
    settings = load(flags={"state_dir": tmp_path, "hypervisor.uri": "fake"})
    parent = WritingParent("fake/save-note", GuestOs.LINUX)

    async def measure() -> BenchReport:
        steps = Steps(lambda _stage, _fraction: None, 10)
        async with open_bench(bench_config(settings, standby_count=1, capacity=6), steps=steps) as session:
            return await measure_branch(
                session, light_task_id=parent.task_id, parent=parent, repetitions=1, steps=steps
            )

    report = run_until_signal(measure())
    [check] = report.checks
    assert check.passed, check.evidence
    assert "saved '-2 -1 0 and the child'" in check.evidence


@pytest.mark.long
def test_bench_parked_begins_all_episodes_in_one_checkpoint_and_checks_each_document(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    # An episode that is never idle for a second keeps its machine from those that are opened.
    options = ("--episodes=5", "--resident=2", "--steps=3", "--think=2", "--price-per-hour=0.5")
    done = run("parked", *options, "--state-dir", str(tmp_path / "state"), "--cache-dir", str(cache), "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert [check["evidence"] for check in report["checks"]] == ["2 of 2; no problem", "5 of 5; no problem"]
    found = report["results"]
    assert len(report["samples"]["step_ms"]) == 5 * 3
    assert found["parked_episodes"] >= 1
    assert found["written_mib_per_step"] > 0
    assert found["dollars_per_desktop_day"] == pytest.approx(12 / found["desktops_per_host"], rel=0.01)
    assert list((cache / "checkpoints").iterdir()) == []


def test_bench_checkpoint_measures_and_checks_fake_desktops_and_leaves_none(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = ("--repetitions", "2", "--depth", "2", "--state-dir", str(tmp_path / "state"), "--cache-dir", str(cache))
    done = run("checkpoint", *options, "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert [check["passed"] for check in report["checks"]] == [True, True]
    assert {len(each) for each in report["samples"].values()} == {2}
    assert {"rollback_ms_p50", "reset_cold_ms_p50", "depth_32_over_1", "editor_mib"} <= set(report["results"])
    assert list((cache / "checkpoints").iterdir()) == []


def test_an_unknown_image_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    for command in ("fork", "branch"):
        done = run_envd(
            "bench", command, "--image", "win11", "--cache-dir", str(tmp_path), "--state-dir", str(tmp_path)
        )
        assert done.status != 0
        assert "win11" in done.err
    assert list(tmp_path.iterdir()) == []


def test_bench_step_measures_fake_desktops_without_peers(tmp_path: Path) -> None:
    options = ("--repetitions", "9", "--others", "2", "--against", "fake", "--json", "--state-dir", str(tmp_path))
    done = run("step", *options)
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["conditions"]["other_count"] == 2
    assert report["results"]["rebuild_ms_p50"] > 0
    assert report["results"]["peer_step_ms_p50"] is None
    assert report["samples"]["peer_step_ms"] == []
    assert len(report["samples"]["overhead_ms"]) == 9
    assert 0 < report["results"]["overhead_ms_p50"] < report["results"]["step_ms_p50"]
    assert report["targets"]["overhead_ms_p50"]["met"] is None
    assert len(report["samples"]["other_step_ms"]) == 2
    assert report["results"]["other_pss_mib"] is None, "no guest runs"
    assert len(report["samples"]["against_overhead_ms"]) == 9
    assert report["conditions"]["against_accelerator"] == "fake"
    (step,) = [row for row in report["against"] if row["result"] == "step_ms_p50"]
    assert step["value"] == report["results"]["step_ms_p50"]
    assert step["against_over_value"] == pytest.approx(step["against"] / step["value"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("branch", "--hypervisor", "oci:"), "bench branch: containers cannot be copied while they run"),
        (("checkpoint", "--hypervisor", "oci:"), "bench checkpoint: containers cannot be copied while they run"),
        (("episodes", "--hypervisor", "oci:"), "boots virtual machines; add --oracles"),
        (("step", "--hypervisor", "fake", "--against", "xen:"), "--against 'xen:' is not supported"),
    ],
)
def test_a_benchmark_that_a_hypervisor_cannot_run_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    done = run_envd("bench", *arguments, "--state-dir", str(tmp_path), "--json")
    assert done.status == 2
    assert problem in json.loads(done.out)["error"]["message"]


def machine_count(database: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            [[count]] = connection.execute("SELECT count(*) FROM machines")
            return int(count)
    except sqlite3.OperationalError:  # not created yet
        return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_ends_a_benchmark_and_leaves_no_machine(tmp_path: Path, number: signal.Signals) -> None:
    database = tmp_path / "bench" / FILE_NAME
    options = ("--hypervisor", "fake", "--state-dir", tmp_path, "--repetitions", "10000", "--json")
    errors = tmp_path / "errors"
    with EnvdProgram("bench", "fork", *options, errors=errors) as bench:
        while not machine_count(database):
            assert bench.process.poll() is None
            time.sleep(0.01)
        assert bench.end(number) == 128 + number, errors.read_text()
    assert bench.output == ""
    assert "Traceback" not in errors.read_text()
    assert machine_count(database) == 0


@pytest.mark.long
def test_bench_scale_compares_concurrent_steps_with_an_echo(tmp_path: Path) -> None:
    """Measures drawn desktops, although no hypervisor is named."""
    directories = ("--state-dir", str(tmp_path / "state"), "--cache-dir", str(tmp_path / "cache"))
    done = run_envd("bench", "scale", "--machines=4", "--seconds=1", "--daemons=2", *directories, "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["conditions"]["daemon_count"] == 2
    assert report["conditions"]["task"] == "fake/count-to-five"
    found = report["results"]
    assert all(value is not None and value >= 0 for value in found.values())
    assert found["server_cpu_ms_per_step"]
    assert found["bare_rpc_per_s"] != found["steps_per_s"]


@pytest.mark.long
async def test_the_clients_of_a_load_use_all_daemons_from_several_processes(tmp_path: Path) -> None:
    settings = load(flags={"hypervisor.uri": "fake", "state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache"})
    steps = Steps(lambda _stage, _share: None, 3)
    async with AsyncExitStack() as stack, echo_server() as echo_address:
        configs = scale_configs(settings, machine_count=8, daemon_count=2)
        daemons = [await stack.enter_async_context(open_bench(config, steps=steps)) for config in configs]
        plan = LoadPlan(
            addresses=[each.daemon.address for each in daemons],
            echo_address=echo_address,
            task_id="fake/count-to-five",
            pool=daemons[0].pool.name,
            client_count=8,
            duration_s=0.3,
            points=((819, 100), (822, 167)),
        )
        async with load_processes(plan, 2) as clients:
            assert await opened_count(clients) == 8
            leased = [each.pool.statistics().leased_count for each in daemons]
            stepped, echoed = await run_phase(clients), await run_phase(clients)
    assert sum(leased) == 8
    assert min(leased) > 0
    for result in (stepped, echoed):
        assert result.call_count == len(result.latencies_ms) >= 8
    assert stepped.response_bytes > 0
    assert stepped.client_cpu_s > 0


async def test_a_benchmark_without_room_on_its_host_says_so() -> None:
    hypervisor = FaultyHypervisor()
    pool = MachinePool(
        PoolParameters(name="p", capacity=2, size=1),
        image=fake_image(),
        host=PoolHost(hypervisor=hypervisor, room=HostRoom(memory_reserve_bytes=1 << 60)),
    )
    bench = BenchSession(daemon=Mock(), client=Mock(), pool=pool)
    try:
        await pool.start()
        with pytest.raises(GuestUnresponsive, match=r"pool p: not ready after .* the host's memory is short"):
            await bench.refilled(shortage_patience_s=0.01)
    finally:
        await pool.close()
        await hypervisor.close()
