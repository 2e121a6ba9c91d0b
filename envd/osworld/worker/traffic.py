"""What OSWorld's code says to the guest, watched: it swallows most failures, and which one it was decides everything.

A guest that answers "there is no such file" tells of the agent; one that does not answer tells of us, and there must be
no score then. OSWorld's getters return None for both.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

#: OSWorld sets no limit on most of its requests. Longer than the guest's own limit for a command, 120 s.
_TIMEOUT_S = 130.0
_MAX_QUOTED_CHARS = 300
#: Routes on which a fault of what was asked for looks like a fault of the service.
_COMMANDS = ("/setup/", "/execute", "/run_python", "/run_bash_script")


class GuestTraffic:
    """Every request to the guest since `forget`, as its outcome."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._broken: str = ""
        self._refused: str = ""
        self._absent: str = ""

    @property
    def broken(self) -> str:
        """The newest request that the guest did not answer, or answered with a fault of its service; empty for none."""
        return self._broken

    @property
    def refused(self) -> str:
        """What the guest's last answer refused; empty where it was granted."""
        return self._refused

    @property
    def absent(self) -> str:
        """Something that was asked for and is not in the guest; empty for none."""
        return self._absent

    def forget(self) -> None:
        """Begin anew."""
        self._broken = self._refused = self._absent = ""

    def watch(self, requests: ModuleType) -> None:
        """Have every request of that library go through here, with a limit where it has none."""
        inner: Callable[..., Any] = requests.sessions.Session.request

        def request(session: object, method: str, url: str, *arguments: Any, **options: Any) -> Any:
            if options.get("timeout") is None:
                options["timeout"] = _TIMEOUT_S
            if not str(url).startswith(self._base_url):
                return inner(session, method, url, *arguments, **options)
            route = f"{method} {str(url)[len(self._base_url) :]}"
            self._refused = ""
            try:
                answer = inner(session, method, url, *arguments, **options)
            except Exception as error:
                self._broken = f"{route}: {type(error).__name__}: {error}"[:_MAX_QUOTED_CHARS]
                raise
            self._note(route, answer.status_code, answer.text if answer.status_code >= 400 else "")
            return answer

        requests.sessions.Session.request = request

    def _note(self, route: str, status: int, text: str) -> None:
        said = f"{route} answered {status}: {text}"[:_MAX_QUOTED_CHARS]
        if status < 400:
            return
        self._refused = said
        if status in {400, 404}:
            self._absent = said
        # A command that cannot be started is answered 500; one that never ended tells nothing of its outcome.
        elif not any(name in route for name in _COMMANDS) or "timed out" in text or "timeout" in text:
            self._broken = said
