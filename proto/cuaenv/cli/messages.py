"""Text of a command's failures, with the remedy at the command line."""

from cuaenv.client import DeadlineExceeded, EnvError, Unauthenticated, Unavailable


def message_of(error: Exception) -> str:
    """Return what to print for an error."""
    match error:
        case DeadlineExceeded():
            return str(error.args[0])
        case Unavailable(reason="", host=host) if host and not host.startswith("ray://"):
            return f"daemon {host}: {error.args[0]}; start it, or correct --envd; a daemon with TLS needs --tls-ca"
        case Unauthenticated():
            return f"{error.args[0]}; commands read the token from the variable ENVD_TOKEN"
        case OSError(filename=str() as name, strerror=str() as problem):
            return f"{name}: {problem}"
        case EnvError():  # its remedy names parameters of Python
            return str(error.args[0])
        case _:
            return str(error)
