"""What a benchmark decides from what it measured, and what its commands do on drawn desktops."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from envd.api.load import LoadResult
from envd.cli.bench.branch import Branch, Frames, branch_report, verdict
from envd.cli.bench.commands import parse_sizes
from envd.cli.bench.fork import UsedMemory, fork_report
from envd.cli.bench.growth import Standby, growth_report, measure_growth
from envd.cli.bench.report import BenchReport, Check, Target, p95, p99
from envd.cli.bench.scale import measure_scale, scale_config, scale_report
from envd.cli.bench.session import Steps, bench_config, open_bench
from envd.cli.private import run_to_end
from envd.config import load
from envd.errors import ConfigError
from envd.hypervisor.processes import memory_of, processor_ns, written_guest_bytes
from envd.hypervisor.raw_fork import raw_arguments

MIB = 1 << 20
REAL: dict[str, object] = {"accelerator": "tcg", "machines": 8, "guest_memory_mib": 1024}
DRAWN: dict[str, object] = {**REAL, "accelerator": "fake"}
PASSED = Check(name="a branch is one", passed=True, evidence="it was")


def verdicts(report: BenchReport) -> dict[str, bool | None]:
    return {target.name: target.met for target in report.targets}


def results(report: BenchReport) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in report.figures}


def fork_found(conditions: dict[str, object], *, memory: UsedMemory | None = None) -> BenchReport:
    return fork_report(
        conditions,
        cold_boot_s=40.0,
        acquire_ms=[50.0, 4.0, 4.0],
        fork_ms=[300.0, 310.0, 900.0],
        destroy_ms=[1.0, 2.0, 3.0],
        raw_ms=[200.0, 100.0, 300.0],
        forks_per_min=(30.0, 50.0),
        memory=memory,
    )


# -- deciding ---------------------------------------------------------------------------------------------------


def test_the_95th_percentile_is_the_least_that_95_of_100_do_not_exceed() -> None:
    assert p95([float(n) for n in range(100, 0, -1)]) == 95.0
    assert p95([float(n) for n in range(1, 21)]) == 19.0
    assert p95([3.0, 1.0]) == 3.0


def test_a_target_is_met_missed_or_says_nothing() -> None:
    target = Target(name="x", value=20.0, limit=20)
    assert target.met is True
    assert replace(target, below=True).met is False
    assert replace(target, value=20.1).met is False
    assert replace(target, value=1000.0, limit=1000, at_least=True).met is True
    assert replace(target, value=None).met is None
    assert replace(target, unless="no guest runs").met is None
    assert target.as_json() == {"met": True, "value": 20.0, "target": "<= 20"}


def test_forks_are_compared_by_their_medians_and_memory_with_the_daemons_growth() -> None:
    memory = UsedMemory(
        pss_bytes=140.0 * MIB,
        private_dirty_bytes=90.0 * MIB,
        standby_pss_bytes=50.0 * MIB,
        daemon_growth_bytes=11.0 * MIB,
    )
    report = fork_found(REAL, memory=memory)
    found = results(report)
    assert found["fork_over_raw"] == pytest.approx(1.55)
    assert found["cold_boot_over_acquire"] == pytest.approx(10_000)
    assert found["marginal_pss_mib"] == pytest.approx(151)
    assert verdicts(report) == {
        "acquire_ms_p50": True,
        "cold_boot_over_acquire": True,
        "fork_over_raw": True,
        "marginal_pss_mib": False,
    }


def test_targets_say_nothing_about_other_machines_than_they_are_about() -> None:
    memory = UsedMemory(pss_bytes=MIB, private_dirty_bytes=MIB, standby_pss_bytes=MIB, daemon_growth_bytes=0)
    four = {target.name: target for target in fork_found({**REAL, "machines": 4}, memory=memory).targets}
    assert four["marginal_pss_mib"].unless == "machines is 4, not 8"
    assert set(verdicts(fork_found(DRAWN)).values()) == {None}


def test_a_branch_with_more_written_memory_than_the_target_names_is_not_held_against_it() -> None:
    small = Branch(branch_ms=390, parent_pause_ms=61, copy_ms=80, start_ms=250, total_ms=380, dirty_bytes=32 * MIB)
    large = replace(small, dirty_bytes=40 * MIB)
    report = branch_report(REAL, light=[small], editor=[large], check=PASSED)
    assert verdicts(report) == {
        "light_branch_ms_p50": True,
        "light_parent_pause_ms_p50": False,
        "branch_ms_p50": None,
        "parent_pause_ms_p50": None,
    }
    assert results(report)["other_ms_p50"] == 50


def test_the_99th_percentile_is_the_least_that_99_of_100_do_not_exceed() -> None:
    assert p99([float(n) for n in range(100, 0, -1)]) == 99.0
    assert p99([3.0, 1.0]) == 3.0


def scale_found(
    *, machine_count: int = 256, opened_count: int = 256, whole_count: int = 0, p99_ms: float = 200.0
) -> BenchReport:
    latencies_ms = [p99_ms] * 20 + [100.0] * 980
    return scale_report(
        {**DRAWN, "machine_count": machine_count},
        stepped=LoadResult(call_count=1000, elapsed_s=2.0, latencies_ms=latencies_ms, whole_count=whole_count),
        bare=LoadResult(call_count=4000, elapsed_s=4.0, latencies_ms=[1.0]),
        opened_count=opened_count,
        server_cpu_s=1.5,
        lags_ms=[1.0] * 95 + [30.0] * 5,
    )


def test_steps_are_judged_against_bare_calls_of_the_same_run() -> None:
    report = scale_found()
    found = results(report)
    assert (found["steps_per_s"], found["bare_rpc_per_s"], found["steps_share"]) == (500.0, 1000.0, 0.5)
    assert (found["p50_ms"], found["p99_ms"], found["server_cpu_ms_per_step"]) == (100.0, 200.0, 1.5)
    assert verdicts(report) == {"steps_share": True, "p99_ms": True, "loop_lag_ms_p99": False}
    assert verdicts(scale_found(p99_ms=300.0))["p99_ms"] is False
    assert set(verdicts(scale_found(machine_count=64, opened_count=64)).values()) == {None}
    assert report.passed


def test_clients_without_episodes_and_frames_that_come_whole_fail_the_run() -> None:
    assert not scale_found(opened_count=255).passed
    assert not scale_found(whole_count=1).passed


def test_growth_is_judged_by_the_largest_number_of_machines() -> None:
    one = Standby(
        machine_count=1,
        acquire_ms=[3.0],
        pss_bytes=MIB,
        private_dirty_bytes=MIB,
        available_drop_bytes=MIB,
        machines_cpu_percent=0.1,
        daemon_cpu_percent=0.2,
    )
    sixteen = replace(one, machine_count=16, machines_cpu_percent=3.0)
    assert verdicts(growth_report(REAL, [one, sixteen])) == {"machines_cpu_percent_16": False}
    assert verdicts(growth_report(REAL, [one])) == {"machines_cpu_percent_1": None}


FRAMES = Frames(parent="f1", child="f1", later="f1")


def judged(
    *,
    frames: Frames = FRAMES,
    parent_file: tuple[str, str] = ("", ""),
    child: str = "text and child",
    parent: str = "text and parent",
) -> Check:
    return verdict(
        frame_ids=frames,
        parent_file=parent_file,
        child_saved=("text and child", child),
        parent_saved=("text and parent", parent),
    )


def test_a_branch_is_one_when_the_child_goes_on_and_the_parent_stays() -> None:
    assert judged().passed
    for wrong, said in (
        (judged(frames=replace(FRAMES, child="f2")), "the child began with frame f2"),
        (judged(frames=replace(FRAMES, later="f2")), "the parent showed frame f1, and f2 after"),
        (judged(parent_file=("", "text and child")), "the parent's file held ''"),
        (judged(child="and child"), "the child saved 'and child', not 'text and child'"),
        (judged(parent="text and child and parent"), "the parent saved 'text and child and parent'"),
    ):
        assert not wrong.passed
        assert said in wrong.evidence


def test_a_failed_check_fails_the_report_and_a_missed_target_does_not() -> None:
    slow = Branch(branch_ms=5000, parent_pause_ms=500, copy_ms=1, start_ms=1, total_ms=5000, dirty_bytes=MIB)
    report = branch_report(REAL, light=[slow], editor=[slow], check=PASSED)
    assert set(verdicts(report).values()) == {False}
    assert report.passed
    assert not replace(report, checks=(replace(PASSED, passed=False),)).passed


def test_qemu_alone_is_given_libvirts_command_line_with_files_a_name_and_a_monitor_of_its_own() -> None:
    given = [
        "/usr/bin/qemu-system-x86_64",
        *("-name", "guest=envd-0a1b-desktop-77,debug-threads=on"),
        *("-object", '{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/s/l/master-key.aes"}'),
        *("-object", "memory-backend-file,id=env.ram,mem-path=/s/templates/m.ram,share=off"),
        *("-chardev", "socket,id=charmonitor,fd=33,server=on,wait=off"),
        *("-add-fd", "set=0,fd=27,opaque=serial0-source"),
        *("-blockdev", '{"driver":"file","filename":"/s/machines/desktop-77/disk.qcow2"}'),
        *("-vnc", "vnc=unix:/s/machines/desktop-77/vnc.sock"),
    ]
    own = Path("/s/machines/bench-1")
    assert raw_arguments(given, model=Path("/s/machines/desktop-77"), own=own, monitor_fd=9, console_fd=11) == [
        "/usr/bin/qemu-system-x86_64",
        *("-name", "guest=envd-0a1b-bench-1,debug-threads=on"),
        *("-object", "memory-backend-file,id=env.ram,mem-path=/s/templates/m.ram,share=off"),
        *("-chardev", "socket,id=charmonitor,fd=9,server=on,wait=off"),
        *("-add-fd", "set=0,fd=11,opaque=serial0-source"),
        *("-blockdev", '{"driver":"file","filename":"/s/machines/bench-1/disk.qcow2"}'),
        *("-vnc", "vnc=unix:/s/machines/bench-1/vnc.sock"),
    ]


def test_sizes_are_numbers_of_machines_in_ascending_order() -> None:
    assert parse_sizes("16,1, 4,4") == (1, 4, 16)
    for wrong in ("", "1;4", "0,1", "65"):
        with pytest.raises(ConfigError, match="--sizes"):
            parse_sizes(wrong)


def test_a_benchmark_has_one_pool_free_ports_and_state_of_its_own(tmp_path: Path) -> None:
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
    assert own.hypervisor_uri == f"qemu:///embed?root={tmp_path}/bench/libvirt"
    assert own.pools.keys() == {"desktop"}
    pool = own.pools["desktop"]
    assert (pool.size, pool.machine_limit, pool.memory_mib) == (4, 5, 2048)
    assert pool.allow_guest_access
    assert not pool.always_running


# -- measuring --------------------------------------------------------------------------------------------------


def test_a_process_is_measured_by_its_own_clock_and_memory() -> None:
    own = os.getpid()
    before_ns, began_ns = processor_ns(own), time.process_time_ns()
    while time.process_time_ns() - began_ns < 20_000_000:
        pass
    assert processor_ns(own) - before_ns >= 20_000_000
    assert 0 < memory_of(own).private_dirty_bytes <= memory_of(own).pss_bytes
    assert written_guest_bytes(own) == 0


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ENVD_")}
    return subprocess.run(
        [sys.executable, "-m", "envd", "bench", *args, "--hypervisor", "fake"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=environment,
    )


def test_forks_of_drawn_desktops_are_measured_and_one_json_object_says_that_no_guest_ran(tmp_path: Path) -> None:
    done = run("fork", "--n", "2", "--repetitions", "2", "--json", "--state-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["conditions"]["accelerator"] == "fake"
    assert told["conditions"]["repetitions"] == 2
    assert len(told["samples"]["acquire_ms"]) == 2
    assert told["results"]["raw_qemu_fork_ms_p50"] is None
    assert told["targets"]["fork_over_raw"] == {
        "met": None,
        "value": None,
        "target": "<= 1.6",
        "unless": "drawn desktops: no guest runs",
    }
    assert "bench fork" in done.stderr


def test_a_branch_of_a_drawn_desktop_is_measured_checked_and_told_as_tables(tmp_path: Path) -> None:
    done = run("branch", "--repetitions", "2", "--state-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "branch_ms_p50" in done.stdout
    assert "passed a child types on from its parent's text" in done.stdout
    assert "milk\\nbread\\n-2 -1 0 1 and the child" in done.stdout


def test_standby_sets_of_drawn_desktops_are_measured_one_after_the_other(tmp_path: Path) -> None:
    settings = load(flags={"state_dir": tmp_path, "hypervisor.uri": "fake"})
    stages: list[str] = []
    steps = Steps(lambda stage, _fraction: stages.append(stage), 8)
    work = measure_growth(settings, task_id="fake/save-note", sizes=(1, 2), repetitions=2, steps=steps, idle_s=0.1)
    report = run_to_end(work)
    found = results(report)
    assert found["pss_mib_2"] is None
    assert (found["acquire_ms_p50_1"] or 0) > 0
    assert (found["daemon_cpu_percent_2"] or 0) > 0
    assert {"1 ready", "2 ready, idle"} <= set(stages)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_benchmark_and_leaves_no_machine(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "envd", "bench", "fork", "--hypervisor", "fake", "--state-dir", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--repetitions", "10000", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "bench fork" in process.stderr.readline()
    time.sleep(1.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert out == ""
    assert "Traceback" not in err


def test_many_clients_step_at_once_and_an_echo_is_called_as_often(tmp_path: Path) -> None:
    settings = load(flags={"hypervisor.uri": "fake", "state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache"})

    async def measure() -> BenchReport:
        steps = Steps(lambda _stage, _share: None, 3)
        async with open_bench(scale_config(settings, machine_count=4), steps=steps) as bench:
            return await measure_scale(
                bench, task_id="fake/count-to-five", machine_count=4, duration_s=0.5, steps=steps
            )

    report = run_to_end(measure())
    assert report.passed, report.checks
    found = results(report)
    assert all(value is not None and value >= 0 for value in found.values())
    assert found["bare_rpc_per_s"] != found["steps_per_s"]
