"""Errors that the host receives as text."""


class AgentError(Exception):
    """A command that cannot be performed; the host receives the message."""


class NotFoundError(AgentError):
    """A path that does not exist, in the words of Windows, which the host recognises."""

    def __init__(self, path: str, *, is_directory: bool = False) -> None:
        thing = "path" if is_directory else "file"
        super().__init__(f"failed to open file '{path}': The system cannot find the {thing} specified.")
