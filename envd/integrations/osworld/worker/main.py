"""The worker program: imports OSWorld once, then forks a process in its own sandbox for each job.

Arguments are a job's memory limit in bytes and the directories that jobs need; `envd.base.sandbox.fork_server` says
how the worker is asked for jobs. Its greeting is `{"ready": {"verbs": [], "getters": [], "metrics": []},
"shortcoming": ""}`; a shortcoming is what control groups do not limit here. On a job's socket, one line of JSON each,
it receives the job and sends

- `{"port": 5000}` with a listening socket of the sandbox's loopback; the receiver connects it to the guest;
- `{"step": 0}` as each step of a setup starts, sent from within the sandbox, hence untrusted;
- `{"result": {}}` or `{"failure": ""}`, sent from within the sandbox, hence untrusted;
- `{"end": ""}` from outside the sandbox: empty, or what ended the job.

Closing the socket kills the job. Standard output is not part of the protocol: OSWorld's code may print anything.
"""

import json
import os
import socket
from typing import Any

from envd.base.sandbox import cgroup, enclosure, fork_server
from envd.integrations.osworld.worker import jobs

GUEST_PORT = 5000
#: Most processors of a job; a browser uses two.
_CPUS = 2
_MAX_JOB_BYTES = 4 << 20
_LOG_TAIL_BYTES = 600


def main(memory_bytes: int, visible: list[str]) -> None:
    """Serve jobs until the control socket is closed."""
    fork_server.serve(lambda: _prepare(memory_bytes, visible))


def _prepare(memory_bytes: int, visible: list[str]) -> fork_server.Prepared:
    """See `fork_server.serve`."""
    hierarchy = cgroup.find_hierarchy()
    # The files in memory and the data of one process have the limit each.
    groups = cgroup.JobGroups(hierarchy, memory_bytes=2 * memory_bytes, cpus=_CPUS) if hierarchy else None
    tools = jobs.load_tools()

    def supervise(number: int, channel: socket.socket, group: cgroup.ControlGroup | None) -> str:
        job = json.loads(_read_line(channel))
        limits = enclosure.Limits(time_s=job["timeout_s"], memory_bytes=memory_bytes)

        def run(alive: int) -> None:
            if group:
                group.enter()
            enclosure.enclose(number, visible=visible, files=job["files"], limits=limits, alive=alive)
            _run(channel, job, tools)

        enclosure.separate(number)
        with socket.create_server(("127.0.0.1", GUEST_PORT)) as listener:
            socket.send_fds(channel, [_line({"port": GUEST_PORT})], [listener.fileno()])
        return fork_server.run_in_child(channel, job["timeout_s"], run, fork=group.fork if group else os.fork)

    return {"ready": jobs.names(tools), "shortcoming": cgroup.shortcoming(hierarchy)}, supervise, groups


def _run(channel: socket.socket, job: dict[str, Any], tools: jobs.OsworldModules) -> None:
    """Run the job, in the sandbox, and send its outcome."""
    log = os.open("log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        outcome: dict[str, object] = {"result": _do(job, tools, channel)}
    except jobs.JobError as error:
        outcome = {"failure": str(error)}
    except BaseException as error:
        outcome = {"failure": f"{type(error).__name__}: {error}; {_tail(log)}"}
    fork_server.send(channel, outcome)


def _do(job: dict[str, Any], tools: jobs.OsworldModules, channel: socket.socket) -> dict[str, object]:
    context = jobs.Context(
        tools,
        enclosure.CACHE,
        port=GUEST_PORT,
        platform=job["platform"],
        screen_px=tuple(job["screen_px"]),
        password=job["password"],
        is_stopped=job["is_stopped"],
    )
    if job["kind"] == "set_up":
        steps = list(enumerate(job["steps"], job["first_step"]))
        return jobs.set_up(context, steps, on_step=lambda index: fork_server.send(channel, {"step": index}))
    return jobs.evaluate(context, tools, job["evaluator"])


def _tail(log: int) -> str:
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
    return json.dumps(value).encode() + b"\n"
