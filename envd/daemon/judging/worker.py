"""The program of `workers`: imports judge functions once, and runs each job in a fork and a sandbox of its own.

Started as `python -m envd.daemon.judging.worker MEMORY_MIB CPU_S [VISIBLE ...]`; `envd.base.sandbox.fork_server` says
how it is asked for jobs. The sandbox has no files, sockets and rights; it sees the Python environment and the VISIBLE
directories. On a host that lets this user create no sandbox, the limits of memory and CPU time remain.

A job on its socket is a length (4 bytes, big endian) and a pickled (function, arguments). It comes from the daemon and
is trusted; the data in its arguments comes from a guest and is not. Modules are imported when the first job needs one:
most daemons judge no pictures, and NumPy with the decoders is half of the program's memory, which each fork has to map.
The answer is a line of JSON, never a pickle: a decoder that a guest has taken over must not reach the daemon.
"""

import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

import envd
from envd.base.errors import GuestError
from envd.base.sandbox import cgroup, enclosure, fork_server

HEADER = struct.Struct(">I")

#: Exit status of a job that used up its CPU time.
EXCEEDED_CPU = int(signal.SIGXCPU)

_EVIDENCE_CHARS = 4000


def prepare(memory_mib: int, cpu_s: int, visible: list[str]) -> fork_server.Prepared:
    """See `fork_server.serve`."""
    hierarchy = cgroup.find_hierarchy()
    groups = cgroup.JobGroups(hierarchy, memory_bytes=memory_mib << 20, cpus=1) if hierarchy else None
    problem = enclosure.problem()
    # Jobs can create no sockets.
    shares_network = not problem and enclosure.leave_network()
    limits = enclosure.Limits(
        time_s=None, memory_bytes=memory_mib << 20, process_count=16, file_count=4096, has_sockets=False
    )

    def supervise(number: int, channel: socket.socket, group: cgroup.ControlGroup | None) -> str:
        # If the host runs out of memory, the kernel ends jobs first.
        Path("/proc/self/oom_score_adj").write_text("1000")

        def judge(alive: int) -> None:
            if group:
                group.enter()
            if not problem:
                enclosure.enclose(number, visible=visible, files={}, limits=limits, alive=alive)
            _limit(memory_mib, cpu_s)
            with channel.makefile("rb") as jobs:
                job = jobs.read(HEADER.unpack(jobs.read(HEADER.size))[0])
            own = os.getpid()
            answer = _answer(job)
            # A fork that the job's code made returns from it too.
            if os.getpid() == own:
                fork_server.send(channel, answer)

        if not problem:
            enclosure.separate(number, shares_network=shares_network)
        return fork_server.run_in_child(channel, None, judge, fork=group.fork if group else os.fork)

    warning = problem and f"judges run outside the sandbox: {problem}"
    return {"ready": True, "warning": warning, "note": cgroup.shortcoming(hierarchy)}, supervise, groups


def load(module: str) -> None:
    """Import the module of a job's function."""
    importlib.import_module(module)
    # Decoders are plug-ins that Pillow otherwise imports on first use.
    if pictures := sys.modules.get("PIL.Image"):
        pictures.init()


def _answer(job: bytes) -> dict[str, object]:
    try:
        function, arguments = pickle.loads(job)  # noqa: S301 -- made by the daemon
        outcome = function(*arguments)
    except GuestError as error:
        return {"guest_error": str(error)}
    except MemoryError:
        return {"excess": "judging it needs more memory than its limit"}
    except RecursionError:
        return {"excess": "it is nested too deeply to be judged"}
    # Every other error is a bug of a checker, and reported as one.
    except Exception as error:
        return {"bug": repr(error)}
    evidence = outcome.evidence[:_EVIDENCE_CHARS]
    parts = [(part.name, part.score, part.evidence[:_EVIDENCE_CHARS]) for part in outcome.parts]
    return {"score": outcome.score, "evidence": evidence, "parts": parts}


def _limit(memory_mib: int, cpu_s: int) -> None:
    # Process 1 of a namespace ignores signals without a handler. This one runs while a decoder holds the interpreter.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGXCPU, ctypes.cast(libc._exit, ctypes.c_void_p))
    for limit, value in (
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    # The time of a fork starts at 0. Its second is not to be spent on the sandbox.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s + 1, resource.RLIM_INFINITY))


if __name__ == "__main__":
    python = (sys.prefix, sys.base_prefix, sys.base_exec_prefix, str(Path(envd.__file__).parent))
    fork_server.serve(lambda: prepare(int(sys.argv[1]), int(sys.argv[2]), [*python, *sys.argv[3:]]), load)
