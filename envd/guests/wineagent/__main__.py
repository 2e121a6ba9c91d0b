"""Command line: start Wine's desktop, keep it running, and answer the host on the guest agent's port."""

import argparse
import logging
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from .commands import Commands, write_all
from .drive import Drive, Files
from .processes import Processes
from .scripts import Scripts
from .shell import HELPER, Shell, await_screen, set_desktop_size

#: Without a host the port reads as empty at once; QEMU's agent waits as long.
_RECONNECT_S = 0.1

logger = logging.getLogger("wineagent")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="wineagent", description="Answer the host as a guest agent for Windows.")
    parser.add_argument("--port", default="/dev/virtio-ports/org.qemu.guest_agent.0", help="(default: %(default)s)")
    parser.add_argument("--user", default="user", help="user of the session (default: %(default)s)")
    parser.add_argument("--display", default=":0", help="X display of the session (default: %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)

    home = Path("/home") / options.user
    drive = Drive(home / ".wine", options.user)
    environ = {
        "DISPLAY": options.display,
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/lib/wine:/usr/bin:/bin",
        "WINEDEBUG": "-all",
        "WINEPREFIX": str(drive.prefix),
    }
    set_desktop_size(drive, await_screen(["xrandr", "--current"], environ))
    shell = Shell(lambda: processes.start_in_wine(HELPER))
    processes = Processes(drive, Scripts(drive, shell), environ)
    commands = Commands(Files(drive), processes)
    threading.Thread(target=shell.run, daemon=True, name="shell").start()
    # The host takes the first response for a session that is up.
    shell.ready.wait()
    logger.info("the desktop is up; serving %s", options.port)
    while True:
        # The port appears while the guest boots, and is closed and opened again with the host's end.
        with suppress(OSError), open(options.port, "r+b", buffering=0) as port:
            commands.serve(port.read, partial(write_all, port))
        time.sleep(_RECONNECT_S)


if __name__ == "__main__":
    sys.exit(main())
