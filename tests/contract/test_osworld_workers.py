"""Workers that run OSWorld's code: real processes, sandboxes and guest services, with a stand-in package."""

import asyncio
import os
import platform
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import envd
from envd.base.errors import GuestError, OsworldError
from envd.base.sandbox import seccomp
from envd.integrations.osworld.environment import _IMPORT, Environment
from envd.integrations.osworld.workers import OsworldWorkers, WorkerJob
from tests.support.leftovers import control_groups
from tests.support.local_guestd import LocalGuestd, serve_guestd
from tests.support.osworld import make_stand_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

RULE = {"type": "rule", "rules": {"expected": "yes"}}
YES = {"type": "vm_command_line", "command": "printf yes"}


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LocalGuestd]]:
    with ExitStack() as stack:
        yield [serve_guestd(stack, tmp_path_factory.mktemp("guest") / name) for name in ("one", "other")]


@pytest.fixture
def guest(guests: list[LocalGuestd]) -> LocalGuestd:
    return guests[0]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stand_in(tmp_path_factory.mktemp("venv"))


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("assets")
    (directory / "fetched").write_text("what was expected")
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(python: Path) -> AsyncIterator[OsworldWorkers]:
    workers = OsworldWorkers(python, limit=8, memory_mib=256)
    yield workers
    await workers.aclose()


def scoring(guest: LocalGuestd, evaluator: Mapping[str, Any], *, time_s: float = 20.0, **fields: Any) -> WorkerJob:
    return WorkerJob(
        kind="evaluate",
        guest_url=guest.url,
        platform="Linux",
        screen_px=(1280, 800),
        time_s=time_s,
        evaluator=evaluator,
        **fields,
    )


def setting_up(guest: LocalGuestd, *steps: Mapping[str, Any], **fields: Any) -> WorkerJob:
    return WorkerJob(
        kind="set_up", guest_url=guest.url, platform="Linux", screen_px=(1280, 800), time_s=20.0, steps=steps, **fields
    )


def one(func: str, *, rules: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an evaluator of one metric with an arbitrary result."""
    return {"func": func, "result": YES, "expected": {"type": "rule", "rules": dict(rules or {"expected": "yes"})}}


async def score(workers: OsworldWorkers, guest: LocalGuestd, evaluator: Mapping[str, Any], **fields: Any) -> float:
    return float((await workers.run(scoring(guest, evaluator, **fields)))["score"])


async def test_start_returns_the_names_in_the_package(workers: OsworldWorkers) -> None:
    names = await workers.start()
    verbs = {"launch", "open", "execute", "download", "sleep", "chrome_open_tabs", "update_browse_history"}
    assert set(names["verbs"]) == verbs
    assert "vm_file" in names["getters"]
    assert "exact_match" in names["metrics"]


async def test_the_installation_records_the_names_in_the_package(
    python: Path, workers: OsworldWorkers, tmp_path: Path
) -> None:
    environment = Environment(tmp_path)
    assert environment.known_names() is None
    environment.directory.mkdir(parents=True)
    root, names = Path(envd.__file__).parents[1], environment.directory / "envd-names.json"
    process = await asyncio.create_subprocess_exec(python, "-I", "-c", _IMPORT, str(root), str(names))
    assert await process.wait() == 0
    assert environment.known_names() == await workers.start()


async def test_a_guest_is_scored_by_its_content(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    assert await score(workers, guest, one("exact_match")) == 1.0
    assert await score(workers, guest, one("exact_match", rules={"expected": "no"})) == 0.0


async def test_the_platform_and_the_screen_size_are_passed_to_the_worker(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    evaluator = one("exact_match", rules={"expected": "Linux 1280"}) | {"result": {"type": "platform"}}
    assert await score(workers, guest, evaluator) == 1.0


async def test_postconfig_is_performed_before_the_evaluation(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    step = {"type": "execute", "parameters": {"command": "touch ~/closed", "shell": True}}
    assert await score(workers, guest, one("exact_match") | {"postconfig": [step]}) == 1.0
    assert (guest.home / "closed").exists()


# Failures that are not caused by the agent


@pytest.mark.parametrize("func", ["hang", "spin"])
async def test_an_evaluator_that_hangs_is_killed_at_its_limit_and_gives_no_score(
    workers: OsworldWorkers, guest: LocalGuestd, func: str
) -> None:
    with pytest.raises(GuestError, match=r"exceeded its limit of 1 s"):
        await score(workers, guest, one(func), time_s=1.0)


@pytest.mark.parametrize(
    ("func", "message"),
    [
        ("die", "killed by signal 11"),
        ("leave", "without a result"),
        ("not_a_number", "nan, which is not in"),
        ("nothing", "None, which is not a score"),
        ("no_such_metric", "OSWorld has no metric 'no_such_metric'"),
    ],
)
async def test_an_evaluator_that_breaks_gives_no_score(
    workers: OsworldWorkers, guest: LocalGuestd, func: str, message: str
) -> None:
    with pytest.raises(GuestError, match=message):
        await score(workers, guest, one(func))
    assert await score(workers, guest, one("exact_match")) == 1.0


async def test_memory_beyond_the_limit_fails(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    with pytest.raises(GuestError, match="MemoryError"):
        await score(workers, guest, one("hog", rules={"bytes": 300 << 20}))
    assert await score(workers, guest, one("hog", rules={"bytes": 30 << 20})) == 1.0


async def test_files_beyond_the_limit_fail(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    with pytest.raises(GuestError, match=r"signal 25|File too large|No space left"):
        await score(workers, guest, one("litter", rules={"mebibytes": 300}))


async def test_processes_beyond_the_limit_fail_and_none_outlives_its_job(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    with pytest.raises(GuestError, match=r"BlockingIOError|exceeded its limit"):
        await score(workers, guest, one("multiply"), time_s=10.0)


#: Code in a sandbox of 256 MiB.
HOARDERS = {
    "shared memory": "import mmap; mmap.mmap(-1, 4096)",
    "memory behind a file descriptor": "import os; os.memfd_create('x')",
    "shared memory through a device": "import os\nif not os.path.exists('/dev/zero'): raise PermissionError",
    "a downward-growing mapping": "import mmap; mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100)",
    "huge pages": "import mmap; mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "a larger stack": "import resource; resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, 1 << 30))",
    "empty files": "for number in range(70_000): open(str(number), 'w').close()",
}


@pytest.mark.parametrize("way", HOARDERS)
async def test_memory_that_resource_limits_do_not_count_is_refused(
    workers: OsworldWorkers, guest: LocalGuestd, way: str
) -> None:
    with pytest.raises(GuestError, match=r"PermissionError|not allowed to raise|No space left"):
        await score(workers, guest, one("run_code", rules={"code": HOARDERS[way]}))


#: Each process is within its limit; the first one to end was killed.
TOGETHER = """
import os, signal
for _ in range(8):
    if os.fork() == 0:
        held = b"x" * (100 << 20)
        signal.pause()
raise MemoryError(f"a process ended with {os.waitstatus_to_exitcode(os.wait()[1])}")
"""


@pytest.mark.usefixtures("job_groups")
async def test_the_processes_of_a_job_have_one_memory_limit_together(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    with pytest.raises(GuestError, match=r"ended with -9|killed by signal 9"):
        await score(workers, guest, one("run_code", rules={"code": TOGETHER}))


@pytest.mark.usefixtures("job_groups")
async def test_a_job_runs_in_a_control_group_that_later_jobs_use_again(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    code = "raise ValueError(open('/proc/self/cgroup').read())"
    counts = set()
    await workers.start()
    for _ in range(2):
        # A group is free again once the supervisor of its job has ended.
        while Path(f"/proc/{workers._server.pid}/task/{workers._server.pid}/children").read_text():
            await asyncio.sleep(0.01)
        with pytest.raises(GuestError, match="envd-evaluations-") as caught:
            await score(workers, guest, one("run_code", rules={"code": code}))
        found = re.search(r"(envd-evaluations-\w+)/\d+", str(caught.value))
        assert found
        groups = [group for program in control_groups(found[1]) for group in program.glob("[0-9]*")]
        assert any(f"{path}".endswith(found[0]) for path in groups)
        counts.add(len(groups))
    assert len(counts) == 1


async def test_evaluations_are_the_first_to_be_killed_without_memory(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    code = "assert int(open('/proc/self/oom_score_adj').read()) == 1000"
    assert await score(workers, guest, one("run_code", rules={"code": code})) == 1.0


async def test_an_unresponsive_guest_gives_no_score(workers: OsworldWorkers, tmp_path: Path) -> None:
    with ExitStack() as stack:
        gone = serve_guestd(stack, tmp_path / "home")
        gone.process.terminate()
        gone.process.wait()
    evaluator = {"func": "text_is", "result": {"type": "vm_file", "path": "/x", "dest": "x"}, "expected": RULE}
    with pytest.raises(GuestError, match="the guest did not answer a request completely: post"):
        await score(workers, gone, evaluator)


async def test_a_response_that_says_it_is_incomplete_gives_no_score(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    too_much = {"type": "vm_command_line", "command": "head -c 17000000 /dev/zero | tr '\\0' a"}
    with pytest.raises(GuestError, match="post /execute: the output of a command is incomplete"):
        await score(workers, guest, one("half") | {"result": too_much})


async def test_a_missing_file_does_not_hide_an_incomplete_response(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    (guest.home / "made").write_text("right")
    cut = {"type": "vm_file", "path": str(guest.home / "made"), "dest": "x", "then": "head -c 17000000 /dev/zero"}
    evaluator = {"func": "same_text", "result": cut, "expected": {"type": "cloud_file", "dest": "nowhere"}}
    with pytest.raises(GuestError, match="the output of a command is incomplete"):
        await score(workers, guest, evaluator)


async def test_a_missing_expected_value_gives_no_score(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    evaluator = one("exact_match") | {"expected": {"type": "fussy_file", "path": "/x"}}
    with pytest.raises(GuestError, match="exact_match: the expected value is missing"):
        await score(workers, guest, evaluator)


async def hang(workers: OsworldWorkers, guest: LocalGuestd) -> asyncio.Task[Mapping[str, Any]]:
    """Start a job that hangs, and return when it hangs."""
    marker = guest.home / "hanging"
    marker.unlink(missing_ok=True)
    evaluator = one("hang") | {"result": {"type": "vm_command_line", "command": "touch ~/hanging"}}
    running = asyncio.create_task(workers.run(scoring(guest, evaluator, time_s=50.0)))
    while not marker.exists():
        await asyncio.sleep(0.02)
    return running


async def test_cancelling_a_call_kills_its_job(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    running = await hang(workers, guest)
    assert workers._server.pid
    below = descendants_of(workers._server.pid)
    assert len(below) == 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await all_gone(below)
    assert workers._server.pid


async def test_closing_the_workers_ends_every_job(python: Path, guest: LocalGuestd) -> None:
    workers = OsworldWorkers(python)
    running = await hang(workers, guest)
    assert workers._server.pid
    below = descendants_of(workers._server.pid)
    assert len(below) == 2
    await workers.aclose()
    with pytest.raises(GuestError, match="without a result"):
        await running
    await all_gone(below)


def descendants_of(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants_of(child))]


async def ended(workers: OsworldWorkers) -> None:
    while workers._server.pid:
        await asyncio.sleep(0.02)


async def all_gone(pids: list[int]) -> None:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.02)


async def test_a_killed_worker_is_restarted(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    await workers.start()
    assert workers._server.pid
    os.kill(workers._server.pid, signal.SIGKILL)
    await ended(workers)
    assert await score(workers, guest, one("exact_match")) == 1.0


async def test_a_worker_that_dies_during_a_submission_fails_one_job(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    await workers.start()
    assert workers._server._control
    workers._server._control.shutdown(socket.SHUT_RDWR)
    with pytest.raises(GuestError, match="the worker is gone"):
        await score(workers, guest, one("exact_match"))
    await ended(workers)
    assert await score(workers, guest, one("exact_match")) == 1.0


async def test_a_package_that_cannot_be_imported_says_so(tmp_path: Path) -> None:
    python = make_stand_in(tmp_path / "venv")
    (next(python.parents[1].glob("lib/python*")) / "site-packages/requests.py").write_text("import no_such_thing\n")
    workers = OsworldWorkers(python)
    with pytest.raises(OsworldError, match="No module named 'no_such_thing'"):
        await workers.start()
    with pytest.raises(OsworldError, match="envd osworld install"):
        await OsworldWorkers(tmp_path / "nowhere" / "bin" / "python").start()


# The sandbox


async def test_the_sandboxs_network_reaches_only_the_guest(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(GuestError, match="Connection refused"):
            await score(workers, guest, one("reach", rules={"host": "127.0.0.1", "port": port}))
    with pytest.raises(GuestError, match="Network is unreachable"):
        await score(workers, guest, one("reach", rules={"host": "192.0.2.1", "port": 80}))
    assert await score(workers, guest, one("reach", rules={"host": "127.0.0.1", "port": 5000})) == 1.0


async def test_the_sandbox_has_no_files_processes_or_privileges_of_the_host(
    workers: OsworldWorkers, guest: LocalGuestd, tmp_path: Path
) -> None:
    paths = [str(tmp_path), str(Path.home() / ".cache"), __file__, "/var", "/etc/shadow", "/run"]
    assert await score(workers, guest, one("see", rules={"paths": paths})) == 0.0, "see the stand-in's `see`"


NO_CGROUP_HANDLE = """
import os
for handle in os.listdir("/proc/self/fd"):
    if os.path.lexists(f"/proc/self/fd/{handle}"):
        assert "cgroup" not in os.readlink(f"/proc/self/fd/{handle}"), handle
"""


async def test_a_job_inherits_no_directory_or_control_file_of_the_host(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    await score(workers, guest, one("run_code", rules={"code": NO_CGROUP_HANDLE}))


#: Every number is called with arguments of 0. Nothing may be done, and nothing may be tried by the kernel.
DENIED_CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in numbers:
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    assert (result, ctypes.get_errno()) == (-1, errno.EPERM), f"{name} is allowed"
for number in (435, 451, 462, 1000):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    assert (result, ctypes.get_errno()) == (-1, errno.ENOSYS), f"{number} is allowed"
"""
NAMESPACE = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    result = libc.syscall(ctypes.c_long({clone}), ctypes.c_long(flag | 17), *[ctypes.c_long(0)] * 4)
    assert (result, ctypes.get_errno()) == (-1, errno.EPERM), f"clone with {{flag:#x}} returned {{result}}"
"""
SOCKETS = """
import errno, socket
netlink, packet, vsock, alg = (16, 3, 0), (17, 3, 0), (40, 1, 0), (38, 5, 0)
raw, ping, sctp, raw_6 = (2, 3, 1), (2, 2, 1), (2, 1, 132), (10, 3, 58)
for family, kind, protocol in (netlink, packet, vsock, alg, raw, ping, sctp, raw_6):
    try:
        socket.socket(family, kind, protocol)
    except PermissionError:
        continue
    raise AssertionError(f"a socket of {family}, {kind}, {protocol} is allowed")
"""
#: What evaluators use must still work.
ORDINARY = """
import multiprocessing, mmap, os, select, socket, subprocess, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
assert subprocess.run(["/bin/sh", "-c", "echo a | cat"], capture_output=True, check=True).stdout.split() == [b"a"]
assert list(ThreadPoolExecutor(4).map(abs, [-1, 2])) == [1, 2]
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
one, other = socket.socketpair()
socket.create_server(("127.0.0.1", 0)).close()
socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK).close()
assert socket.getaddrinfo("localhost", 80)
with tempfile.TemporaryFile() as file:
    file.truncate(1 << 20)
    shared = mmap.mmap(file.fileno(), 1 << 20)
    shared[:4] = b"data"
private = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private[:4] = b"data"
"""


@pytest.mark.parametrize("name", ["calls", "namespaces", "sockets"])
async def test_system_calls_that_reach_the_kernels_rare_parts_are_refused(
    workers: OsworldWorkers, guest: LocalGuestd, name: str
) -> None:
    column, _, clone, *_ = seccomp._MACHINES[platform.machine()]
    numbers = [(call, both[column]) for call, both in seccomp._DENIED.items() if both[column] >= 0]
    code = {"calls": DENIED_CALLS, "namespaces": NAMESPACE.format(clone=clone), "sockets": SOCKETS}[name]
    assert await score(workers, guest, one("run_code", rules={"code": code, "numbers": numbers})) == 1.0


async def test_ordinary_system_calls_are_allowed_in_the_sandbox(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    assert await score(workers, guest, one("run_code", rules={"code": ORDINARY})) == 1.0


async def test_the_sandbox_has_its_own_environment_variables(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    names = ["HOME", "TMPDIR", "PATH", "LANG", "USER"]
    assert await score(workers, guest, one("home", rules={"expected": names})) == 1.0


# Faults of OSWorld's own, handled


async def test_a_setup_step_that_osworld_would_only_log_is_a_failure(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    step = {"type": "launch", "parameters": {"command": ["no-such-program"]}}
    with pytest.raises(GuestError, match=r"config\[1\] launch: .*no-such-program"):
        await workers.run(setting_up(guest, {"type": "sleep", "parameters": {"seconds": 0}}, step))


async def test_chrome_verbs_run_inside_the_guest(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    visit = {"url": "https://a.example", "title": "A"}
    await workers.run(setting_up(guest, {"type": "update_browse_history", "parameters": {"history": [visit]}}))
    assert (guest.home / ".config/google-chrome/Default/History").exists()
    with pytest.raises(GuestError, match=r"config\[0\] chrome_open_tabs: KeyError: 'urls_to_open'"):
        await workers.run(setting_up(guest, {"type": "chrome_open_tabs", "parameters": {}}))
    with pytest.raises(GuestError, match=r"config\[0\] update_browse_history: RuntimeError: KeyError: 'url'"):
        await workers.run(setting_up(guest, {"type": "update_browse_history", "parameters": {"history": [{}]}}))


async def test_an_unknown_setup_verb_is_rejected(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    with pytest.raises(GuestError, match="OSWorld has no setup verb 'levitate'"):
        await workers.run(setting_up(guest, {"type": "levitate", "parameters": {}}))


async def test_a_postconfig_step_that_the_guest_refuses_does_not_fail_the_evaluation(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    step = {"type": "launch", "parameters": {"command": ["no-such-program"]}}
    assert await score(workers, guest, one("exact_match") | {"postconfig": [step]}) == 1.0


async def test_in_or_mode_a_missing_file_scores_zero_for_its_metric(
    workers: OsworldWorkers, guest: LocalGuestd
) -> None:
    missing, there = {"type": "fussy_file", "path": "/x"}, YES
    evaluator = {"func": ["exact_match", "exact_match"], "conj": "or", "expected": [RULE, RULE]}
    assert await score(workers, guest, evaluator | {"result": [missing, there]}) == 1.0
    assert await score(workers, guest, evaluator | {"result": [there, missing]}) == 1.0
    assert await score(workers, guest, evaluator | {"result": [missing, missing]}) == 0.0
    assert await score(workers, guest, evaluator | {"conj": "and", "result": [there, missing]}) == 0.0


async def test_several_metrics_score_their_mean_or_maximum(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    evaluator = {"func": ["half", "exact_match"], "result": [YES, YES], "expected": [RULE, RULE]}
    assert await score(workers, guest, evaluator) == 0.75
    assert await score(workers, guest, evaluator | {"func": ["half", "half"], "conj": "or"}) == 0.5


async def test_a_metric_that_fails_on_a_missing_file_scores_zero(workers: OsworldWorkers, guest: LocalGuestd) -> None:
    missing = {"type": "vm_file", "path": str(guest.home / "never-made"), "dest": "x"}
    assert await score(workers, guest, one("trip") | {"result": missing}) == 0.0
    with pytest.raises(GuestError, match="trip raised an error"):
        await score(workers, guest, one("trip") | {"result": {"type": "rule", "rules": {}}})


# Files


async def test_assets_are_found_where_osworld_looks(workers: OsworldWorkers, guest: LocalGuestd, assets: Path) -> None:
    (guest.home / "made").write_text("what was expected")
    evaluator = {
        "func": "same_text",
        "result": {"type": "vm_file", "path": str(guest.home / "made"), "dest": "result.txt"},
        "expected": {"type": "cloud_file", "path": "https://example.org/gold.txt", "dest": "gold.txt"},
    }
    assert await score(workers, guest, evaluator, files={"gold.txt": assets / "fetched"}) == 1.0


async def test_an_evaluation_cannot_change_a_fetched_file(
    workers: OsworldWorkers, guest: LocalGuestd, assets: Path
) -> None:
    (guest.home / "made").write_text("something else")
    overwriting = {"type": "vm_file", "path": str(guest.home / "made"), "dest": "gold.txt"}
    evaluator = one("text_is", rules={"expected": "something else"}) | {"result": overwriting}
    assert await score(workers, guest, evaluator, files={"gold.txt": assets / "fetched"}) == 1.0
    assert (assets / "fetched").read_text() == "what was expected"


async def test_concurrent_evaluations_of_one_task_share_no_files(
    workers: OsworldWorkers, guests: list[LocalGuestd], tmp_path: Path
) -> None:
    # Both write a result of the same name into their cache directory before either continues.
    for number, guest in enumerate(guests):
        (guest.home / "result").write_text(f"episode {number}")
    arrive = f"touch {tmp_path}/$(cat ~/result | tr ' ' '-'); while ! [ -e {tmp_path}/go ]; do sleep 0.05; done"

    def evaluator(guest: LocalGuestd, number: int) -> dict[str, Any]:
        result = {"type": "vm_file", "path": str(guest.home / "result"), "dest": "result.txt", "then": arrive}
        return one("text_is", rules={"expected": f"episode {number}"}) | {"result": result}

    scoring_both = [
        asyncio.create_task(score(workers, guest, evaluator(guest, number))) for number, guest in enumerate(guests)
    ]
    # A failed evaluation never arrives; its job ends with an error or at its limit.
    while len(list(tmp_path.glob("episode-*"))) < 2 and not any(task.done() for task in scoring_both):
        await asyncio.sleep(0.02)
    (tmp_path / "go").touch()
    assert await asyncio.gather(*scoring_both) == [1.0, 1.0]


async def test_64_concurrent_evaluations_agree_with_sequential_ones(
    workers: OsworldWorkers, guests: list[LocalGuestd]
) -> None:
    expected: list[float] = []
    jobs = []
    for number in range(64):
        guest = guests[number % 2]
        path = guest.home / f"result-{number}"
        path.write_text("yes" if number % 3 else "no")
        expected.append(1.0 if number % 3 else 0.0)
        evaluator = one("text_is") | {"result": {"type": "vm_file", "path": str(path), "dest": "result"}}
        jobs.append((guest, evaluator))
    one_by_one = [await score(workers, guest, evaluator) for guest, evaluator in jobs[:16]]
    at_once = await asyncio.gather(*(score(workers, guest, evaluator) for guest, evaluator in jobs))
    assert list(at_once) == expected
    assert one_by_one == expected[:16]
