"""Text of a command's failures, with the remedy at the command line."""

from cuaenv.client import Unauthenticated, Unavailable


def message_of(error: Exception) -> str:
    """Return what to print for an error."""
    match error:
        case Unavailable(reason="", host=host) if host:
            return f"daemon {host}: {error}; start it, or correct --envd; a daemon with TLS needs --tls-ca"
        case Unauthenticated():
            return f"{error}; commands read the token from the variable ENVD_TOKEN"
        case OSError(filename=str() as name, strerror=str() as problem):
            return f"{name}: {problem}"
        case _:
            return str(error)
