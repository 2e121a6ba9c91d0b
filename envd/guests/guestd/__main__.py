"""Command line: serve until SIGTERM or SIGINT."""

import argparse
import logging
import os
import pwd
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from . import VERSION
from .guest import Guest
from .server import Server

logger = logging.getLogger("guestd")

#: The first descriptor that systemd passes (sd_listen_fds(3)).
_LISTEN_FD = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="guestd", description="Serve this desktop session to the host.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")  # noqa: S104
    parser.add_argument("--port", type=int, default=5000, help="0 for any free port (default: %(default)s)")
    parser.add_argument("--socket", metavar="PATH", help="listen on this Unix socket instead of a port")
    parser.add_argument(
        "--wait-window",
        action="append",
        default=[],
        metavar="CLASS",
        help="the session is not ready before a window of this class shows; repeatable",
    )
    parser.add_argument("--user", metavar="NAME", help="act with the rights of this user; needs root")
    parser.add_argument("--version", action="version", version=VERSION)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    # Before it acts as the user, who must not reach the socket's directory.
    listening = _unix_socket(options.socket) if options.socket else _passed_socket()
    if options.user:
        act_as(options.user)
    guest = Guest(wait_windows=options.wait_window)
    with Server((options.host, options.port), guest, listening=listening) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
        address = options.socket or f"{options.host}:{server.server_address[1]}"
        logger.info("version %s listening on %s", VERSION, address)
        threading.Thread(target=guest.warm_up, daemon=True, name="a11y-warm-up").start()
        server.serve_forever()
    return 0


def _passed_socket() -> socket.socket | None:
    """Return the listening socket that systemd passes; None if it passes none."""
    return socket.socket(fileno=_LISTEN_FD) if os.environ.pop("LISTEN_PID", "") == str(os.getpid()) else None


def _unix_socket(path: str) -> socket.socket:
    """Listen on a path; an earlier service may have left its socket there."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(Server.request_queue_size)
    return listening


def act_as(name: str) -> None:
    """Take a user's rights, and stay root's process: the user can neither signal nor trace it (kill(2), ptrace(2))."""
    user = pwd.getpwnam(name)
    os.initgroups(name, user.pw_gid)
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)


if __name__ == "__main__":
    sys.exit(main())
