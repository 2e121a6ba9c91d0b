"""How envd's commands end: errors as an exit status, SIGTERM like Ctrl-C."""

import signal
from typing import NoReturn

from cuaenv.cli import terminal

from envd.base.errors import ConfigError, EnvdError

#: Decorator for commands; see `cuaenv.cli.terminal.reports_errors`.
reports_errors = terminal.reports_errors(
    EnvdError, usage_errors=(ConfigError,), reason_of=lambda error: getattr(error, "reason", "")
)


def stop_on_sigterm() -> None:
    """Unwind this process on SIGTERM as on Ctrl-C, so that the command cleans up."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
