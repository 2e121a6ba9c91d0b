"""The worker process of `workers`: runs one judge function at a time, under limits of memory and CPU time.

Started as `python -m envd.daemon.judging.worker MEMORY_MIB CPU_S`. A job on standard input is a length (4 bytes, big
endian) and a pickled (function, arguments). It comes from the daemon and is trusted; the data in its arguments comes
from a guest and is not. The answer on standard output is a length and a JSON object, never a pickle: a decoder that a
guest has taken over must not reach the daemon.
"""

import ctypes
import json
import pickle
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO

from PIL import Image

import envd.tasks.checkers.union  # noqa: F401 -- imports every judge function before the limits apply
from envd.base.errors import GuestError

HEADER = struct.Struct(">I")

_PR_SET_PDEATHSIG = 1
_EVIDENCE_CHARS = 4000
#: A worker whose memory has grown beyond this ends after its job: allocators rarely return memory.
_RETIRE_MIB = 256


def main(memory_mib: int, cpu_s: int) -> None:
    """Answer jobs until standard input ends."""
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    # Decoders are plug-ins that Pillow otherwise imports on first use.
    Image.init()
    _confine(memory_mib)
    _send(answers, {"ready": True})
    while header := jobs.read(HEADER.size):
        _limit_cpu(cpu_s)
        _send(answers, _answer(jobs.read(HEADER.unpack(header)[0])))


def _answer(job: bytes) -> dict[str, object]:
    try:
        function, arguments = pickle.loads(job)  # noqa: S301 -- made by the daemon
        outcome = function(*arguments)
    except GuestError as error:
        return {"guest_error": str(error)}
    except MemoryError:
        return {"guest_error": "judging it needs more memory than its limit"}
    except RecursionError:
        return {"guest_error": "it is nested too deeply to be judged"}
    # Every other error is a bug of a checker, and reported as one.
    except Exception as error:
        return {"bug": repr(error)}
    # Not ru_maxrss: that of a child starts at the memory of the process that started it.
    resident_mib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
    evidence = outcome.evidence[:_EVIDENCE_CHARS]
    return {"score": outcome.score, "evidence": evidence, "retire": resident_mib > _RETIRE_MIB}


def _confine(memory_mib: int) -> None:
    # The daemon may be killed while a job runs, and a job may never look at its standard input again.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    Path("/proc/self/oom_score_adj").write_text("1000")
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
    main(int(sys.argv[1]), int(sys.argv[2]))
