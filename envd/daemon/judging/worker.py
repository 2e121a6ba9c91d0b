"""The worker process of `workers`: runs one judge function at a time, in a sandbox without files, sockets and rights.

Started as `python -m envd.daemon.judging.worker MEMORY_MIB CPU_S [VISIBLE ...]`. It imports the judge functions, then
forks the process that runs them in `envd.base.sandbox`, which sees the Python environment and the VISIBLE directories.
Where the host lets this user create no sandbox, the limits of memory and CPU time remain.

A job on standard input is a length (4 bytes, big endian) and a pickled (function, arguments). It comes from the daemon
and is trusted; the data in its arguments comes from a guest and is not. The answer on standard output is a length and a
JSON object, never a pickle: a decoder that a guest has taken over must not reach the daemon.
"""

import ctypes
import json
import os
import pickle
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO, NoReturn

from PIL import Image

import envd
import envd.tasks.checkers.union
from envd.base.errors import GuestError
from envd.base.sandbox import cgroup, enclosure

HEADER = struct.Struct(">I")

#: Exit status after a job that used up its CPU time.
EXCEEDED_CPU = int(signal.SIGXCPU)

_EVIDENCE_CHARS = 4000
#: A worker whose memory has grown beyond this ends after its job: allocators rarely return memory.
_RETIRE_MIB = 256


def main(memory_mib: int, cpu_s: int, visible: list[str]) -> None:
    # The daemon may be killed while a job runs, and a job may never look at its standard input again.
    enclosure.die_with_parent()
    Path("/proc/self/oom_score_adj").write_text("1000")
    # Decoders are plug-ins that Pillow otherwise imports on first use.
    Image.init()
    hierarchy = cgroup.find_hierarchy()
    group = hierarchy and cgroup.Group(hierarchy, memory_bytes=memory_mib << 20, cpus=1)
    number, problem = os.getpid(), ""
    limits = enclosure.Limits(
        time_s=None, memory_bytes=memory_mib << 20, process_count=16, file_count=4096, has_sockets=False
    )
    try:
        enclosure.separate(number)
    except (enclosure.SandboxError, OSError) as error:
        problem = str(error)
    alive, held = os.pipe()
    runner = os.fork()
    if runner == 0:
        os.close(held)
        enclosure.die_with_parent()
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        if group:
            group.enter()
        try:
            if not problem:
                enclosure.enclose(number, visible=visible, files={}, limits=limits, alive=alive)
        except (enclosure.SandboxError, OSError) as error:
            problem = str(error)
        _limit(memory_mib)
        # From now on, errors are answers.
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), sys.stderr.fileno())
        _serve(
            cpu_s,
            statm,
            warning=problem and f"judges run outside the sandbox: {problem}",
            note=cgroup.shortcoming(hierarchy),
        )
    signal.signal(signal.SIGTERM, lambda *_: os.kill(runner, signal.SIGKILL))
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.close(stream.fileno())
    status = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    if group:
        group.remove()
    os._exit(EXCEEDED_CPU if status == EXCEEDED_CPU else 0)


def _serve(cpu_s: int, statm: int, *, warning: str, note: str) -> NoReturn:
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    _send(answers, {"ready": True, "warning": warning, "note": note})
    while header := jobs.read(HEADER.size):
        _limit_cpu(cpu_s)
        _send(answers, _answer(jobs.read(HEADER.unpack(header)[0]), statm))
    os._exit(0)


def _answer(job: bytes, statm: int) -> dict[str, object]:
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
    # Not ru_maxrss: that of a child starts at the memory of the process that started it.
    resident_mib = int(os.pread(statm, 256, 0).split()[1]) * resource.getpagesize() >> 20
    evidence = outcome.evidence[:_EVIDENCE_CHARS]
    parts = [(part.name, part.score, part.evidence[:_EVIDENCE_CHARS]) for part in outcome.parts]
    return {"score": outcome.score, "evidence": evidence, "parts": parts, "retire": resident_mib > _RETIRE_MIB}


def _limit(memory_mib: int) -> None:
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


def _limit_cpu(cpu_s: int) -> None:
    """Have the kernel end this process (SIGXCPU) once it has used `cpu_s` more seconds of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft_s = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft_s, resource.RLIM_INFINITY))


def _send(answers: BinaryIO, answer: dict[str, object]) -> None:
    body = json.dumps(answer).encode()
    answers.write(HEADER.pack(len(body)) + body)
    answers.flush()


if __name__ == "__main__":
    python = (sys.prefix, sys.base_prefix, sys.base_exec_prefix, str(Path(envd.__file__).parent))
    main(int(sys.argv[1]), int(sys.argv[2]), [*python, *sys.argv[3:]])
