"""Judge functions in real worker processes: hostile input ends a worker, never the caller or other evaluations."""

import asyncio
import io
import itertools
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import pytest_asyncio
from PIL import Image

from envd.base.errors import EvaluatorFailed, GuestError
from envd.base.sandbox import cgroup, fork_server
from envd.daemon.judging import worker
from envd.daemon.judging.workers import JudgeWorkers
from envd.tasks.checkers import files
from envd.tasks.checkers.base import FoundFile
from envd.tasks.checkers.data import IniEntry, JsonValueAt, judge_data
from envd.tasks.checkers.files import Directory, FileText, judge_directory, judge_file_text
from envd.tasks.checkers.images import ImageLike, judge_image
from envd.tasks.checkers.programs import ProcessRunning, WindowPresent, judge_processes, judge_windows
from envd.tasks.text import CheckOutcome
from tests.support.clock import until
from tests.support.leftovers import control_groups

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: A worker on a host that lets its user create no namespaces.
UNCONFINED = """
import sys
from envd.base.sandbox import fork_server
from envd.daemon.judging import worker
worker.enclosure.problem = lambda: 'unshare failed'
fork_server.serve(lambda: worker.prepare(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
"""
#: Workers import the judge functions of this module.
ROOT = str(Path(__file__).parents[2])
INI = IniEntry(kind="ini_value", path="/a", key="a", equals="x")
BACKTRACKING = FileText.model_validate({"kind": "file_text", "path": "/a", "matches": "(a+)+b"})
TEXT = FileText.model_validate({"kind": "file_text", "path": "/a", "contains": "x"})


def found(data: bytes) -> FoundFile:
    return FoundFile("file", data, len(data))


def png(width: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, 4), (1, 2, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def fill_memory() -> CheckOutcome:
    return CheckOutcome(1.0, f"{len(bytearray(4 << 30))} bytes")


def end_the_worker() -> CheckOutcome:
    os._exit(9)


def forge_every_score() -> CheckOutcome:
    """What code of a hostile evaluator does to the process that runs it, and to what is left of it."""
    vars(files)["judge_text"] = vars(worker)["_answer"] = lambda *_: CheckOutcome(1.0, "forged")
    json.dumps = lambda *_, **__: '{"score": 1.0, "evidence": "forged", "parts": []}'
    for _ in range(3):
        if os.fork() == 0:
            with suppress(OSError):
                os.setsid()
            while True:
                for descriptor in range(64):
                    with suppress(OSError):
                        os.write(descriptor, b'{"score": 1.0, "evidence": "forged", "parts": []}\n')
    return CheckOutcome(1.0, "own")


def answer_twice() -> CheckOutcome:
    for descriptor in range(64):
        with suppress(OSError):
            os.write(descriptor, b'{"score": 1.0, "evidence": "first", "parts": []}\n{"end": ""}\n')
    return CheckOutcome(0.0, "own")


def score_beyond_1() -> CheckOutcome:
    return CheckOutcome(1e9, "own")


def leave_a_process() -> CheckOutcome:
    ready, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.write(done, b"x")
        signal.pause()
    os.read(ready, 1)
    return CheckOutcome(0.0, "left one")


def linger() -> CheckOutcome:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.pause()
    return CheckOutcome(0.0, "")


def below(pid: int | None) -> list[int]:
    """Return the processes that a process and its descendants have started."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(lower for child in children for lower in below(child))]


async def judging(judges: JudgeWorkers) -> tuple[asyncio.Task[CheckOutcome], int, int]:
    """Start a job that does not end; return it, its supervisor and the process that judges, when that waits."""
    job = asyncio.create_task(judges(linger))
    while True:
        assert not job.done(), job
        match below(judges._server.pid):
            case [supervisor, judge] if int(status(judge)["SigBlk"], 16):
                return job, supervisor, judge
        await asyncio.sleep(0.01)


def status(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


async def all_gone(*pids: int) -> None:
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def reach_out(token_file: str) -> CheckOutcome:
    reached = []
    for reach in (lambda: Path(token_file).read_text(), socket.socket, lambda: os.mkdir("/a")):
        try:
            reach()
        except OSError:
            continue
        reached.append(reach)
    return CheckOutcome(0.0 if reached else 1.0, f"reached {reached}")


def name_imported_clients() -> CheckOutcome:
    return CheckOutcome(0.0, " ".join(sys.modules.keys() & {"aiohttp", "grpc"}))


def fail() -> CheckOutcome:
    raise ZeroDivisionError("a checker's bug")


@asynccontextmanager
async def new_judges() -> AsyncIterator[JudgeWorkers]:
    made = JudgeWorkers(limit=2, cpu_s=1, quick_s=60.0, visible=[ROOT])
    yield made
    await made.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judges() -> AsyncIterator[JudgeWorkers]:
    """Judges for all tests that change no part of them: the program that they fork takes 0.3 s of CPU time to start."""
    async with new_judges() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def unstarted() -> AsyncIterator[JudgeWorkers]:
    async with new_judges() as made:
        yield made


async def test_an_outcome_is_that_of_the_function_and_no_process_is_left(judges: JudgeWorkers) -> None:
    assert await judges(judge_file_text, found(b"axb"), TEXT) == judge_file_text(found(b"axb"), TEXT)
    assert await judges(judge_file_text, found(b"ab"), TEXT) == judge_file_text(found(b"ab"), TEXT)
    await all_gone(*below(judges._server.pid))


async def test_a_job_changes_no_later_score(judges: JudgeWorkers) -> None:
    for _ in range(3):
        # What it makes of its own score does not matter here.
        with suppress(EvaluatorFailed):
            await judges(forge_every_score)
        outcomes = await asyncio.gather(
            *(judges(judge_file_text, found(content), TEXT) for content in (b"wrong", b"x", b"also wrong"))
        )
        assert [outcome.score for outcome in outcomes] == [0.0, 1.0, 0.0]
        assert not any("forged" in outcome.evidence for outcome in outcomes)
    await all_gone(*below(judges._server.pid))


async def test_the_first_score_of_a_daemon_does_not_wait_for_imports_of_clients(judges: JudgeWorkers) -> None:
    assert (await judges(name_imported_clients)).evidence == ""


async def test_a_module_is_imported_when_the_first_job_needs_it_and_then_kept(unstarted: JudgeWorkers) -> None:
    def libraries() -> str:
        return Path(f"/proc/{unstarted._server.pid}/maps").read_text()

    await unstarted(judge_file_text, found(b"x"), TEXT)
    assert "/numpy/" not in libraries()
    image = ImageLike(kind="image_like", path="/a", guest_path="/b")
    assert (await unstarted(judge_image, found(png()), found(png()), image)).score == 1.0
    assert "/numpy/" in libraries()


async def test_a_module_that_cannot_be_imported_fails_its_own_job(
    judges: JudgeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("only_in_the_daemon")
    function = FunctionType(fail.__code__, vars(module), "fail")
    monkeypatch.setattr(function, "__module__", module.__name__)
    vars(module)["fail"] = function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RuntimeError, match="No module named 'only_in_the_daemon'"):
        await judges(function)
    assert (await judges(judge_file_text, found(b"x"), TEXT)).score == 1.0


async def test_processes_that_a_job_has_started_end_with_it(judges: JudgeWorkers) -> None:
    job, supervisor, judge = await judging(judges)
    other = asyncio.create_task(judges(leave_a_process))
    assert (await other).evidence == "left one"
    assert not job.done()
    await until(lambda: sorted(below(judges._server.pid)) == sorted([supervisor, judge]))
    job.cancel()
    await all_gone(supervisor, judge)


@pytest.mark.parametrize(("hostile", "message"), [(answer_twice, "malformed answer"), (score_beyond_1, "0 to 1")])
async def test_a_malformed_answer_gives_no_score(
    hostile: Callable[[], CheckOutcome], message: str, judges: JudgeWorkers
) -> None:
    with pytest.raises(EvaluatorFailed, match=message):
        await judges(hostile)


async def test_a_fork_server_that_was_killed_is_started_again(judges: JudgeWorkers) -> None:
    job, supervisor, judge = await judging(judges)
    first = judges._server.pid
    assert first
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EvaluatorFailed, match="was ended"):
        await job
    await all_gone(supervisor, judge)
    await until(lambda: not judges._server.pid)
    assert (await judges(judge_file_text, found(b"axb"), TEXT)).score == 1.0
    assert judges._server.pid != first


async def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("envd/__init__.py", "json.py", "PIL/__init__.py", "sitecustomize.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    judges = JudgeWorkers(limit=1, quick_s=60.0)
    assert (await judges(judge_file_text, found(b"axb"), TEXT)).score == 1.0
    await judges.aclose()


async def test_a_refusal_of_a_judge_function_is_raised_as_it_is(judges: JudgeWorkers) -> None:
    checker = ProcessRunning(kind="process", program="a")
    with pytest.raises(GuestError, match="processes"):
        await judges(judge_processes, b"", checker)


async def test_a_bug_of_a_checker_is_not_blamed_on_the_guest(judges: JudgeWorkers) -> None:
    with pytest.raises(RuntimeError, match="fail: ZeroDivisionError"):
        await judges(fail)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        # A pattern of a task that backtracks without end.
        (
            judge_file_text,
            (
                found(b"a" * 40 + b"!"),
                FileText.model_validate({"kind": "file_text", "path": "/a", "matches": "(a+)+b"}),
            ),
        ),
        # Pillow's reader of plain PPM is quadratic in comments.
        (
            judge_image,
            (
                found(b"P3\n4000 4000\n255\n" + b"#\n" * 2_000_000),
                found(png()),
                ImageLike(kind="image_like", path="/a", guest_path="/b"),
            ),
        ),
    ],
    ids=["regex", "ppm"],
)
async def test_input_that_keeps_a_decoder_busy_costs_its_own_evaluation_only(
    judges: JudgeWorkers, function: object, arguments: tuple[object, ...]
) -> None:
    assert callable(function)
    hostile = asyncio.create_task(judges(function, *arguments))
    others = [await judges(judge_file_text, found(b"axb"), TEXT) for _ in range(3)]
    assert [outcome.score for outcome in others] == [1.0] * 3
    outcome = await hostile
    assert (outcome.score, outcome.evidence) == (0.0, "judging it needs more CPU time than its limit")
    assert (await judges(judge_file_text, found(b"axb"), TEXT)).score == 1.0


async def test_hostile_inputs_in_all_slots_do_not_delay_other_evaluations_to_their_end() -> None:
    judges = JudgeWorkers(limit=1, cpu_s=600, quick_s=0.5, time_s=600.0)
    hostile = [asyncio.create_task(judges(judge_file_text, found(b"a" * 60 + b"!"), BACKTRACKING)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await judges(judge_file_text, found(b"axb"), TEXT)).score == 1.0
    assert not any(task.done() for task in hostile)
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    await judges.aclose()


async def test_a_start_may_take_any_time_while_the_worker_runs(
    unstarted: JudgeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = itertools.count()
    monkeypatch.setattr(fork_server, "_STALL_S", 0.01)
    monkeypatch.setattr(fork_server, "_cpu_s", lambda _: next(used) / 1000)
    assert (await unstarted(judge_file_text, found(b"axb"), TEXT)).score == 1.0
    assert next(used) > 2


@pytest.mark.parametrize(
    ("used_s", "message"),
    [(lambda _: 0.5, r"it did not run for 0\.01 s"), (lambda _: 121.0, r"it used 121 s of CPU time")],
)
async def test_a_worker_that_is_stuck_or_busy_while_it_starts_is_ended(
    used_s: Callable[[int], float], message: str, unstarted: JudgeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_STALL_S", 0.01)
    monkeypatch.setattr(fork_server, "_cpu_s", used_s)
    with pytest.raises(RuntimeError, match=rf"judge worker did not start: {message} \(status -9; "):
        await unstarted(judge_file_text, found(b"axb"), TEXT)
    assert repr(unstarted) == "<JudgeWorkers not running>"


async def test_a_worker_that_fails_to_start_is_reported_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho warning >&2\necho no module named envd >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeError, match=r"judge worker did not start: .* \(status 3; no module named envd\)"):
        await JudgeWorkers()(judge_file_text, found(b"axb"), TEXT)


async def test_concurrent_jobs_start_one_program(unstarted: JudgeWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, count = unstarted._server._start, 0

    async def start() -> None:
        nonlocal count
        count += 1
        await begin()

    monkeypatch.setattr(unstarted._server, "_start", start)
    outcomes = await asyncio.gather(*(unstarted(judge_file_text, found(b"axb"), TEXT) for _ in range(4)))
    assert [outcome.score for outcome in outcomes] == [1.0] * 4
    assert count == 1


async def test_memory_beyond_the_limit_scores_0(judges: JudgeWorkers) -> None:
    outcome = await judges(fill_memory)
    assert (outcome.score, outcome.evidence) == (0.0, "judging it needs more memory than its limit")


async def test_a_job_that_ends_itself_fails_its_evaluation_only(judges: JudgeWorkers) -> None:
    with pytest.raises(EvaluatorFailed, match="was ended") as failed:
        await judges(end_the_worker)
    assert failed.value.__cause__ is not None  # the task's start is judged too
    assert (await judges(judge_file_text, found(b"axb"), TEXT)).score == 1.0


async def test_a_job_without_end_is_ended_by_its_time_limit() -> None:
    judges = JudgeWorkers(limit=1, cpu_s=60, time_s=1.0)
    with pytest.raises(EvaluatorFailed, match=r"\b1 s") as failed:
        await judges(judge_file_text, found(b"a" * 60 + b"!"), BACKTRACKING)
    # On a busy host an input that uses up its CPU time is late first: the task's start is judged to tell them apart.
    assert isinstance(failed.value.__cause__, TimeoutError)
    await judges.aclose()


async def test_a_cancelled_evaluation_leaves_no_process(judges: JudgeWorkers) -> None:
    job, supervisor, judge = await judging(judges)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    await all_gone(supervisor, judge)
    assert below(judges._server.pid) == []


async def test_a_judge_has_no_privileges_and_no_descriptors_besides_its_socket(judges: JudgeWorkers) -> None:
    job, _, judge = await judging(judges)
    lines = status(judge)
    assert int(lines["CapEff"], 16) == int(lines["CapBnd"], 16) == 0
    assert (lines["Seccomp"], lines["NoNewPrivs"], lines["NSpid"].split()[-1]) == ("2", "1", "1")
    if os.geteuid() == 0:
        assert {int(user) >> 16 for user in lines["Uid"].split()} == {0x7000}
        # Its network has no address, not even of a loopback.
        assert "127.0.0.1" in Path("/proc/self/net/fib_trie").read_text()
        assert "127.0.0.1" not in Path(f"/proc/{judge}/net/fib_trie").read_text()
    process = Path(f"/proc/{judge}")
    opened = [os.readlink(link) for link in (process / "fd").iterdir()]
    assert sorted(re.sub(r"\d+", "N", name) for name in opened) == [*["/dev/null"] * 3, "socket:[N]"]
    for kind in ("net", "mnt", "ipc", "pid"):
        assert os.readlink(process / "ns" / kind) != os.readlink(f"/proc/self/ns/{kind}")
    job.cancel()


async def test_a_judge_reaches_no_file_or_socket_of_the_host(judges: JudgeWorkers, tmp_path: Path) -> None:
    token_file = tmp_path / "tokens"
    token_file.write_text("secret")
    token_file.chmod(0o666)
    outcome = await judges(reach_out, str(token_file))
    assert outcome.score == 1.0, outcome.evidence


async def test_without_a_sandbox_judges_run_under_limits_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    program = tmp_path / "unconfined.py"
    program.write_text(UNCONFINED)
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    judges = JudgeWorkers(limit=2, cpu_s=1, quick_s=60.0, visible=[ROOT])
    assert (await judges(judge_file_text, found(b"axb"), TEXT)).score == 1.0
    assert "CPU time" in (await judges(judge_file_text, found(b"a" * 60 + b"!"), BACKTRACKING)).evidence
    assert "memory" in (await judges(fill_memory)).evidence
    await judges.aclose()
    assert caplog.text.count("judges run outside the sandbox: unshare failed") == 1


async def test_every_kind_of_guest_data_can_be_sent_to_a_worker(judges: JudgeWorkers) -> None:
    directory = Directory.model_validate({"kind": "directory", "path": "/a", "entries": ["b/"]})
    assert (await judges(judge_directory, frozenset({"b/"}), directory)).score == 1.0
    window = WindowPresent.model_validate({"kind": "window", "window": {"title": "t"}})
    assert (await judges(judge_windows, b"0x1  0 a.A desktop t\n", window)).score == 1.0
    json_value = JsonValueAt(kind="json_value", path="/a", at=("x",), equals=1)
    assert (await judges(judge_data, found(b'{"x": 1}'), json_value)).score == 1.0
    image = ImageLike(kind="image_like", path="/a", guest_path="/b")
    assert (await judges(judge_image, found(png()), found(png()), image)).score == 1.0


#: The memory group of a job, or (version 2) its only group, below that of its program.
OWN_GROUP = re.compile(r"^(?:\d+:memory|0:):.*/(envd-evaluations-\w+/\d+)$", re.MULTILINE)


def name_group() -> CheckOutcome:
    return CheckOutcome(1.0, OWN_GROUP.findall(Path("/proc/self/cgroup").read_text())[0])


async def group_of_job(judges: JudgeWorkers) -> str:
    """Run a job and return its group, which is free again: the supervisor of the job has ended."""
    group = (await judges(name_group)).evidence
    await until(lambda: below(judges._server.pid) == [])
    return group


def group_of(pid: int) -> str:
    return str(OWN_GROUP.findall(Path(f"/proc/{pid}/cgroup").read_text())[0])


def existing(group: str) -> list[Path]:
    """Return the directories of the program that a job's group belongs to."""
    return control_groups(group.partition("/")[0])


@pytest.mark.usefixtures("job_groups")
async def test_jobs_use_the_groups_of_ended_jobs_which_end_with_the_program(unstarted: JudgeWorkers) -> None:
    first = await group_of_job(unstarted)
    job, _, judge = await judging(unstarted)
    assert group_of(judge) == first
    other = (await unstarted(name_group)).evidence
    assert other != first
    job.cancel()
    await until(lambda: below(unstarted._server.pid) == [])
    assert {await group_of_job(unstarted) for _ in range(3)} <= {first, other}
    # Another program of this host leaves the groups of one that runs alone.
    cgroup.find_hierarchy()
    assert existing(first)
    await unstarted.aclose()
    assert not existing(first)


@pytest.mark.usefixtures("job_groups")
async def test_the_groups_of_a_program_that_was_killed_are_removed_by_its_daemon(unstarted: JudgeWorkers) -> None:
    job, supervisor, judge = await judging(unstarted)
    group = group_of(judge)
    assert unstarted._server.pid
    os.kill(unstarted._server.pid, signal.SIGKILL)
    with pytest.raises(EvaluatorFailed, match="was ended"):
        await job
    await unstarted.aclose()
    await all_gone(supervisor, judge)
    assert not existing(group)


@pytest.mark.usefixtures("job_groups")
async def test_the_group_of_a_job_whose_supervisor_was_killed_is_removed_too(unstarted: JudgeWorkers) -> None:
    job, supervisor, judge = await judging(unstarted)
    group = group_of(judge)
    os.kill(supervisor, signal.SIGKILL)
    # At once: the program no longer waits for the job, whose processes are still ending.
    await unstarted.aclose()
    with pytest.raises(EvaluatorFailed, match="was ended"):
        await job
    assert not existing(group)


#: Forks into groups of the hierarchy that the argument names, with and without clone3(2), and prints the groups of
#: both children, the first before it enters; then what becomes of a group that has a process.
FORKS_INTO_A_GROUP = """
import os, signal, sys, time
from envd.base.sandbox import cgroup

# Hosts that use version 1 have no controllers in version 2.
hierarchy = cgroup.Hierarchy(sys.argv[1], "cgroup.max.depth")
cgroup.Hierarchy.is_version_2 = True
read = cgroup.ControlGroup._read
cgroup.ControlGroup._read = lambda self, file: "0" if file == "memory.current" else read(self, file)
groups = cgroup.JobGroups(hierarchy, memory_bytes=8, cpus=1)

def child_of(group, enters):
    if group.fork() == 0:
        if enters:
            group.enter()
        print(open("/proc/self/cgroup").read().splitlines()[-1], flush=True)
        os._exit(0)
    assert os.wait()[1] == 0

child_of(groups.take(), enters=False)
into, cgroup._fork_into = cgroup._fork_into, lambda group: -1
child_of(groups.take(), enters=True)
cgroup._fork_into = into
group = groups.take()
if group.fork() == 0:
    signal.pause()
print(group.is_clean())
groups.put_back(group)
print(groups.take().path.rpartition("/")[2], os.wait()[1])
# It may be removed already.
print(group.remove())
groups.close()
print([name for name in os.listdir(sys.argv[1]) if name.startswith("envd-evaluations-")])
"""


def version_2() -> str:
    """Return where control groups of version 2 are and can be created; empty if nowhere."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="ascii").splitlines()]
    return next((line[4] for line in mounts if "cgroup2" in line and os.access(line[4], os.W_OK)), "")


@pytest.mark.skipif(not version_2(), reason="needs control groups of version 2")
async def test_a_child_is_created_in_its_group_or_enters_it() -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKS_INTO_A_GROUP, version_2(), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    lines = (await program.communicate())[0].decode().splitlines()
    groups = [OWN_GROUP.findall(line)[0].partition("/") for line in lines[:2]]
    assert groups[0][0] == groups[1][0]
    assert [number for _, _, number in groups] == ["0", "1"]
    # A group that has a process is not used again, and its process is killed.
    assert lines[2:5] == ["False", f"3 {int(signal.SIGKILL)}", "True"]
    assert groups[0][0] not in lines[5]
