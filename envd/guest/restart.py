"""Restart guestd in its session after it ended: an agent may do anything in its guest, including killing guestd.

The QEMU guest agent runs, as root, the line of the image's session script that starts guestd, with the user and
environment of that session. A running guestd is never restarted, even if it is slow.
"""

import logging

from envd.base.errors import GuestError, GuestUnresponsive
from envd.guest.agent import GuestAgent

logger = logging.getLogger(__name__)

_TIMEOUT_S = 20.0
_ALREADY_RUNNING = 3
#: Runs in the guest as root. `-I` ignores Python paths that users may have set.
_PROGRAM = f"""
import os, pwd, sys
def arguments(pid):
    with open(f"/proc/{{pid}}/cmdline", "rb") as file:
        return file.read().split(b"\\0")
session = None
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        argv = arguments(pid)
    except OSError:
        continue
    if argv[1:3] == [b"-m", b"guestd"]:
        sys.exit({_ALREADY_RUNNING})
    if argv[0].rpartition(b"/")[2] == b"openbox":
        session = pid
if session is None:
    sys.exit("the session has ended: no window manager is running")
line = next(line for line in open("/usr/lib/envd/session") if "-m guestd" in line)
with open(f"/proc/{{session}}/environ", "rb") as file:
    environ = dict(pair.split(b"=", 1) for pair in file.read().split(b"\\0") if b"=" in pair)
user = pwd.getpwuid(os.stat(f"/proc/{{session}}").st_uid)
if os.fork():
    sys.exit()
os.setsid()
os.initgroups(user.pw_name, user.pw_gid)
os.setgid(user.pw_gid)
os.setuid(user.pw_uid)
os.chdir(user.pw_dir)
nothing = os.open("/dev/null", os.O_RDWR)
for number in range(3):
    os.dup2(nothing, number)
os.execve("/bin/sh", ["sh", "-c", line.strip().rstrip("&")], environ)
"""


async def restart_guestd(agent: GuestAgent) -> bool:
    """Start guestd if it is not running, and return whether it was started. It answers some seconds later.

    Other failures are logged, not raised: the caller already reports that guestd is missing.

    Raises:
        MachineLost: The machine is lost.
    """
    try:
        result = await agent.run(["/usr/bin/python3", "-I", "-c", _PROGRAM], timeout_s=_TIMEOUT_S)
    except (GuestError, GuestUnresponsive) as error:
        logger.warning("%r: guestd could not be restarted: %s", agent, error)
        return False
    if result.exit_code == 0:
        logger.warning("%r: guestd had ended and was restarted", agent)
    elif result.exit_code != _ALREADY_RUNNING:
        stderr = result.stderr.decode("utf-8", "replace")[-200:]
        logger.warning("%r: guestd could not be restarted: %s", agent, stderr)
    return result.exit_code == 0
