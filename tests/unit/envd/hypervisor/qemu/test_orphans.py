"""Which ended processes are collected: daemons of others at once, our own children by those who started them."""

import subprocess
import sys

# A process of its own: a subreaper stays one, and collects the children of all tests.
SCRIPT = """
import os, subprocess, sys, time
from envd.hypervisor.qemu.processes import collect_orphans

DAEMON = '''
import os, time
read, write = os.pipe()
if os.fork():
    os.close(write)
    print(os.read(read, 32).decode(), flush=True)
    os._exit(0)
os.setsid()
between = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == between:
    time.sleep(0.01)
os.write(write, f"{os.getpid()} {os.getppid()}".encode())
os._exit(0)
'''

def state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it is collected between open and read
        return "collected"

collect_orphans()
ours = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
os.waitid(os.P_PID, ours.pid, os.WEXITED | os.WNOWAIT)
for _ in range(3):
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, check=True)
    daemon, parent = map(int, done.stdout.split())
    assert parent == os.getpid()
    while state(daemon) != "collected":
        time.sleep(0.01)
print(state(ours.pid), ours.wait())
"""


def test_daemons_are_collected_and_our_own_children_keep_their_status() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("Z 7\n", "")
