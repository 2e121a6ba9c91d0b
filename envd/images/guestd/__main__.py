"""Command line: serve until SIGTERM or SIGINT."""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence

from . import VERSION
from .guest import Guest
from .server import Server

logger = logging.getLogger("guestd")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="guestd", description="Serve this desktop session to the host.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")  # noqa: S104
    parser.add_argument("--port", type=int, default=5000, help="0 for any free port (default: %(default)s)")
    parser.add_argument(
        "--wait-window",
        action="append",
        default=[],
        metavar="CLASS",
        help="the session is not ready before a window of this class shows; repeatable",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    guest = Guest(wait_windows=options.wait_window)
    with Server((options.host, options.port), guest) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
        logger.info("version %s listening on %s:%d", VERSION, options.host, server.server_address[1])
        threading.Thread(target=guest.a11y.warm_up, daemon=True, name="a11y-warm-up").start()
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
