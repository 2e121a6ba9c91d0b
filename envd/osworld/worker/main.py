"""The worker program: imports OSWorld once, then forks a process in a sandbox of its own for each job.

Runs with a control socket (SOCK_SEQPACKET) and the directories that jobs must see. There it says first what it is,
`{"ready": {"verbs": [], "getters": [], "metrics": []}}` or `{"error": ""}`, and then takes jobs: each message carries
one stream socket. On that socket, a line of JSON each, comes the job and go out

- `{"port": 5000}` with a listening socket of the sandbox's loopback: whoever accepts on it is the guest in there;
- `{"step": 0}` as each step of a setup begins, from within the sandbox, hence to be mistrusted;
- `{"result": {}}` or `{"failure": ""}`, from within the sandbox, hence to be mistrusted;
- `{"end": ""}` from outside of it: empty, or what ended the job.

Closing the socket kills the job. Standard output is nobody's protocol: OSWorld's code prints what it likes.
"""

import gc
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any, NoReturn

from envd.osworld.worker import jobs, sandbox

GUEST_PORT = 5000
_MAX_JOB_BYTES = 4 << 20
_LOG_TAIL_BYTES = 600


def main(control_fd: int, visible: list[str]) -> None:
    """Serve jobs until the control socket is closed."""
    sandbox.die_with_parent()
    with socket.socket(fileno=control_fd) as control:
        try:
            tools = jobs.load_tools()
        except BaseException as error:
            control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
            raise
        control.send(json.dumps({"ready": jobs.names(tools)}).encode())
        # What is there now is shared with every job, as long as nobody writes to it.
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
                _keep(number, socket.socket(fileno=handles[0]), tools, visible)
            os.close(handles[0])


def _keep(number: int, channel: socket.socket, tools: jobs.Toolbox, visible: list[str]) -> NoReturn:
    """Run one job in a sandbox, from outside of it: end it when its time is up or nobody wants it any more."""
    end = ""
    try:
        sandbox.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job = json.loads(_read_line(channel))
        limits = sandbox.Limits(time_s=job["timeout_s"], memory_bytes=job["memory_bytes"])
        sandbox.separate(number)
        with socket.create_server(("127.0.0.1", GUEST_PORT)) as listener:
            socket.send_fds(channel, [_line({"port": GUEST_PORT})], [listener.fileno()])
        # Readable, for it is at its end, once this process is gone.
        alive, held = os.pipe()
        runner = os.fork()
        if runner == 0:
            os.close(held)
            _run(number, channel, job, tools, alive=alive, visible=visible, limits=limits)
        end = _wait(runner, channel, limits.time_s)
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    _tell(channel, {"end": end})
    os._exit(0)


def _wait(runner: int, channel: socket.socket, time_s: float) -> str:
    """Return, once a job's process is gone, what ended it; nothing if it did that itself."""
    handle = os.pidfd_open(runner)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLRDHUP)
    events = poll.poll(time_s * 1000)
    if not any(ready == handle for ready, _ in events):
        # The first process of its namespace: all others there go with it.
        os.kill(runner, signal.SIGKILL)
        os.waitpid(runner, 0)
        return "nobody waits for it" if events else f"exceeded its limit of {time_s:g} s"
    code = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    return "" if code == 0 else f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def _run(
    number: int,
    channel: socket.socket,
    job: dict[str, Any],
    tools: jobs.Toolbox,
    *,
    alive: int,
    visible: list[str],
    limits: sandbox.Limits,
) -> NoReturn:
    """Do the job, enclosed. Never returns, whatever the job's code does."""
    log = -1
    try:
        sandbox.die_with_parent()
        sandbox.enclose(number, visible=visible, files=job["files"], limits=limits)
        # Whoever becomes another user forgets what its parent's end means to it; meanwhile it may have come.
        sandbox.die_with_parent()
        if select.select([alive], [], [], 0)[0]:
            os._exit(1)
        os.close(alive)
        log = os.open("log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        answer: dict[str, object] = {"result": _do(job, tools, channel)}
    except jobs.JobError as error:
        answer = {"failure": str(error)}
    except BaseException as error:
        answer = {"failure": f"{type(error).__name__}: {error}; {_tail(log)}"}
    _tell(channel, answer)
    os._exit(0)


def _do(job: dict[str, Any], tools: jobs.Toolbox, channel: socket.socket) -> dict[str, object]:
    guest = jobs.Guest(GUEST_PORT, job["platform"], tuple(job["screen_px"]), job["password"])
    context = jobs.Context(tools, guest, sandbox.CACHE)
    if job["kind"] == "set_up":
        return jobs.set_up(context, job["steps"], on_step=lambda index: _tell(channel, {"step": index}))
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
            raise ConnectionError("the job did not come whole")
        data += part
    return data


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _tell(channel: socket.socket, value: dict[str, Any]) -> None:
    # Where nobody listens any more, nobody waits for it either.
    with suppress(OSError):
        channel.sendall(_line(value))
