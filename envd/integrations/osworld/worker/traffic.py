"""Watch the requests of OSWorld's code to the guest: it swallows most failures, and their kind decides the score.

"There is no such file" is a fact about the agent's work. No response, or an incomplete one, is a fault of the guest,
and there must be no score. OSWorld's getters return None or the incomplete part.
"""

import json
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: OSWorld sets no limit on most of its requests. Longer than the guest's own limit for a command, 120 s.
_TIMEOUT_S = 130.0
_MAX_QUOTED_CHARS = 300
#: Routes on which a fault of the requested command looks like a fault of the service.
_COMMANDS = ("/setup/", "/execute", "/run_python", "/run_bash_script")
#: The guest lacks a route, or resources to start a command (EAGAIN, ENOMEM, ENFILE, EMFILE, ENOSPC).
_FAULTS = re.compile(r"no such route|cannot be started: \[Errno (?:11|12|23|24|28)\]")
#: Routes whose responses say if they are incomplete.
_PARTIAL = ("/accessibility", "/list_directory", "/execute", "/run_python", "/run_bash_script")
#: The guest's service keeps this much of a command's output, and only `/execute` says that there was more.
_MAX_OUTPUT_CHARS = 16 << 20
#: The files of OSWorld's tasks have a tenth of that. An agent can leave a file of any size, which would take minutes.
_MAX_FILE_BYTES = 256 << 20
_SHOWN_TERMINAL = re.compile(r'<terminal\b[^>]{0,4096}showing=\\?["\']true')
#: The first element of an accessibility tree, in JSON, that lacks parts: applications timed out, or it is too large.
_CUT_TREE = re.compile(r'<(?:\w{1,64}:)?desktop-frame\b[^>]{0,4096}\struncated=\\?["\']true')


class GuestTraffic:
    """The outcomes of the requests to the guest since the last `forget`."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self.broken = ""
        """The newest request without a complete response, or with a fault of the guest's service; empty for none."""
        self.refused = ""
        """The last response, if it was a refusal; empty otherwise."""
        self.absent = ""
        """A requested item that does not exist in the guest; empty for none."""

    def forget(self) -> None:
        """Reset all outcomes."""
        self.broken = self.refused = self.absent = ""

    def watch(self, requests: ModuleType) -> None:
        """Intercept every request of that library, and add a time limit to those without one."""
        inner: Callable[..., Any] = requests.sessions.Session.request

        def request(session: object, method: str, url: str, *arguments: Any, **options: Any) -> Any:
            if options.get("timeout") is None:
                options["timeout"] = _TIMEOUT_S
            if not str(url).startswith(self._base_url):
                return inner(session, method, url, *arguments, **options)
            route = f"{method} {str(url)[len(self._base_url) :]}"
            self.refused = ""
            if is_file := route.endswith(" /file"):
                options["stream"] = True
            try:
                response = inner(session, method, url, *arguments, **options)
                if is_file and int(response.headers.get("Content-Length", 0)) > _MAX_FILE_BYTES:
                    response.close()
                    response.status_code = 404
                    self.absent = f"{route}: the file has more than {_MAX_FILE_BYTES} bytes"
                    return response
                if is_file:
                    response.content  # noqa: B018 -- reads it
            except Exception as error:
                self.broken = f"{route}: {type(error).__name__}: {error}"[:_MAX_QUOTED_CHARS]
                raise
            if response.status_code >= 400:
                self._note_refusal(route, response.status_code, response.text)
            elif any(name in route for name in _PARTIAL) and (problem := incompleteness(response.text)):
                self.broken = f"{route}: {problem}"[:_MAX_QUOTED_CHARS]
            elif "/terminal" in route and is_without_text(response.text):
                # The response does not say whether an application did not answer in time; the whole tree does.
                tree = inner(session, "GET", f"{self._base_url}/accessibility", timeout=_TIMEOUT_S)
                if tree.status_code >= 400 or incompleteness(tree.text) or _SHOWN_TERMINAL.search(tree.text):
                    self.broken = f"{route}: the text of a terminal is missing"
            return response

        requests.sessions.Session.request = request

    def _note_refusal(self, route: str, status: int, text: str) -> None:
        described = f"{route} returned {status}: {text}"[:_MAX_QUOTED_CHARS]
        self.refused = described
        if _FAULTS.search(text):
            self.broken = described
        elif status in {400, 404}:
            self.absent = described
        # A command that cannot be started yields 500; one that timed out says nothing about its outcome.
        elif not any(name in route for name in _COMMANDS) or "timed out" in text or "timeout" in text:
            self.broken = described


def is_without_text(body: str) -> bool:
    """Whether a response of `/terminal` has no text, as without a terminal."""
    try:
        return json.loads(body)["output"] is None
    except (ValueError, RecursionError, LookupError, TypeError):
        return True


def incompleteness(body: str) -> str:
    """Return why a response with JSON is incomplete; empty if it is complete, or does not say."""
    if _CUT_TREE.search(body):
        return "the accessibility tree is incomplete: an application did not answer in time, or it is too large"
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(value, dict):
        return ""
    outputs = (value.get("output"), value.get("error"))
    if value.get("truncated") or any(isinstance(text, str) and len(text) >= _MAX_OUTPUT_CHARS for text in outputs):
        return "the output of a command is incomplete: it exceeds the guest's limit"
    return _incomplete_directory(value.get("directory_tree"))


def _incomplete_directory(tree: object) -> str:
    waiting = [tree]
    # A loop: a guest could nest directories deeper than Python's recursion limit.
    while waiting:
        directory = waiting.pop()
        if not isinstance(directory, dict):
            continue
        if directory.get("truncated") or "error" in directory:
            return f"the list of a directory is incomplete: {directory.get('error') or 'too many entries'}"
        children = directory.get("children") or []
        if not isinstance(children, list):
            return "the list of a directory is malformed"
        waiting += reversed(children)
    return ""
