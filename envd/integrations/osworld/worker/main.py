"""The worker program: imports OSWorld once, then forks a process in its own sandbox for each job.

Arguments are a control socket (SOCK_SEQPACKET) and the directories that jobs need. On the control socket the worker
first sends `{"ready": {"verbs": [], "getters": [], "metrics": []}, "shortcoming": ""}` or `{"error": ""}`; a
shortcoming is what control groups do not limit here. Then it receives jobs: each message carries one stream socket.
On that socket, one line of JSON each, it receives the job and sends

- `{"port": 5000}` with a listening socket of the sandbox's loopback; the receiver connects it to the guest;
- `{"step": 0}` as each step of a setup starts, sent from within the sandbox, hence untrusted;
- `{"result": {}}` or `{"failure": ""}`, sent from within the sandbox, hence untrusted;
- `{"end": ""}` from outside the sandbox: empty, or what ended the job.

Closing the socket kills the job. Standard output is not part of the protocol: OSWorld's code may print anything.
"""

import gc
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any, NoReturn

from envd.base.sandbox import cgroup, enclosure
from envd.integrations.osworld.worker import jobs

GUEST_PORT = 5000
#: Most processors of a job; a browser uses two.
_CPUS = 2
_MAX_JOB_BYTES = 4 << 20
_LOG_TAIL_BYTES = 600


def main(control_fd: int, visible: list[str]) -> None:
    """Serve jobs until the control socket is closed."""
    enclosure.die_with_parent()
    with socket.socket(fileno=control_fd) as control:
        try:
            hierarchy = cgroup.find_hierarchy()
            tools = jobs.load_tools()
        except BaseException as error:
            control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
            raise
        greeting = {"ready": jobs.names(tools), "shortcoming": cgroup.shortcoming(hierarchy)}
        control.send(json.dumps(greeting).encode())
        # Jobs share the memory of all objects that exist now, as long as the collector does not write to it.
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        number = 0
        while True:
            message, handles, _, _ = socket.recv_fds(control, 16, 1)
            if not message:
                return
            number += 1
            if os.fork() == 0:
                control.close()
                _supervise(number, socket.socket(fileno=handles[0]), tools, visible, hierarchy)
            os.close(handles[0])


def _supervise(
    number: int, channel: socket.socket, tools: jobs.Toolbox, visible: list[str], hierarchy: cgroup.Hierarchy | None
) -> NoReturn:
    """Run one job in a sandbox, from outside it; end it when its time is up or its socket is closed."""
    end = ""
    group = None
    try:
        enclosure.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job = json.loads(_read_line(channel))
        limits = enclosure.Limits(time_s=job["timeout_s"], memory_bytes=job["memory_bytes"])
        if hierarchy is not None:
            # The files in memory and the data of one process have this limit each.
            group = cgroup.Group(hierarchy, memory_bytes=2 * limits.memory_bytes, cpus=_CPUS)
        enclosure.separate(number)
        with socket.create_server(("127.0.0.1", GUEST_PORT)) as listener:
            socket.send_fds(channel, [_line({"port": GUEST_PORT})], [listener.fileno()])
        # The read end becomes readable (end of file) once this process is gone.
        alive, held = os.pipe()
        runner = os.fork()
        if runner == 0:
            os.close(held)
            _run(number, channel, job, tools, alive=alive, visible=visible, limits=limits, group=group)
        end = _wait(runner, channel, job["timeout_s"])
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    if group is not None:
        group.remove()
    _send(channel, {"end": end})
    os._exit(0)


def _wait(runner: int, channel: socket.socket, time_s: float) -> str:
    """Wait until a job's process is gone; return what ended it, empty if it exited with 0."""
    handle = os.pidfd_open(runner)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLRDHUP)
    events = poll.poll(time_s * 1000)
    if not any(ready == handle for ready, _ in events):
        # It is process 1 of its namespace: killing it kills all other processes there.
        os.kill(runner, signal.SIGKILL)
        os.waitpid(runner, 0)
        return "its socket was closed" if events else f"exceeded its limit of {time_s:g} s"
    code = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    return "" if code == 0 else f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def _run(
    number: int,
    channel: socket.socket,
    job: dict[str, Any],
    tools: jobs.Toolbox,
    *,
    alive: int,
    visible: list[str],
    limits: enclosure.Limits,
    group: cgroup.Group | None,
) -> NoReturn:
    """Run the job in the sandbox. Never returns, whatever the job's code does."""
    log = -1
    try:
        if group is not None:
            group.enter()
        enclosure.enclose(number, visible=visible, files=job["files"], limits=limits, alive=alive)
        log = os.open("log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        outcome: dict[str, object] = {"result": _do(job, tools, channel)}
    except jobs.JobError as error:
        outcome = {"failure": str(error)}
    except BaseException as error:
        outcome = {"failure": f"{type(error).__name__}: {error}; {_tail(log)}"}
    _send(channel, outcome)
    os._exit(0)


def _do(job: dict[str, Any], tools: jobs.Toolbox, channel: socket.socket) -> dict[str, object]:
    guest = jobs.Guest(GUEST_PORT, job["platform"], tuple(job["screen_px"]), job["password"], job["is_stopped"])
    context = jobs.Context(tools, guest, enclosure.CACHE)
    if job["kind"] == "set_up":
        steps = list(enumerate(job["steps"], job["first_step"]))
        return jobs.set_up(context, steps, on_step=lambda index: _send(channel, {"step": index}))
    return jobs.evaluate(context, tools, job["evaluator"])


def _tail(log: int) -> str:
    if log < 0:
        return "it printed nothing"
    size = os.fstat(log).st_size
    return os.pread(log, _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES)).decode("utf-8", "replace")


def _read_line(channel: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = channel.recv(1 << 16)
        if not part or len(data) > _MAX_JOB_BYTES:
            raise ConnectionError("the job is incomplete or too large")
        data += part
    return data


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _send(channel: socket.socket, value: dict[str, Any]) -> None:
    # A closed socket means that the caller has abandoned the job.
    with suppress(OSError):
        channel.sendall(_line(value))
