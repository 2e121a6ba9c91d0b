"""The SDK that the gateway client of AReaL's OSWorld example imports as `pssdk`: the protocol `areal-sandbox` of envd.

```sh
echo 'from trainer.adapters.areal.pssdk import *' > pssdk.py     # on the Python path of the example
```

A start is idempotent: the daemon opens one episode for a session until it is stopped, however often a start is retried.
"""

import functools
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["BaseSandboxClusterTool", "SandboxError", "with_retry"]

_TOO_MANY, _FIRST_SERVER_ERROR = 429, 500
_DEFAULT_TIMEOUT_S = 600.0

C = TypeVar("C", bound=type)


class SandboxError(RuntimeError):
    """A call failed; `status` is the HTTP status, 0 if there was no response."""

    def __init__(self, message: str, *, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class BaseSandboxClusterTool:
    """Starts and stops the sandbox of one session."""

    def __init__(
        self,
        cluster_endpoint: str,
        application_secret_token: str,
        session_id: str | None = None,
        global_call_timeout: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            cluster_endpoint: URL of the daemon's protocol, such as http://127.0.0.1:8001.
            application_secret_token: The token; anything if the daemon requires none.
            session_id: Name of the session; by default a new one.
            global_call_timeout: Seconds until a call fails, unless it has its own limit.
        """
        self.session_id = session_id or uuid.uuid4().hex
        self._endpoint = cluster_endpoint.rstrip("/")
        self._token = application_secret_token
        self._timeout_s = global_call_timeout

    def sandbox_start(self, body: dict[str, Any] | None = None, call_timeout: float | None = None) -> dict[str, Any]:
        """Open the session's sandbox and return `{"sandboxId": ...}`; `body` may name its `task_id`.

        Raises:
            SandboxError: It was not opened.
        """
        return self._post("/sandbox/start", body or {}, call_timeout)

    def sandbox_stop(self, call_timeout: float | None = None) -> dict[str, Any]:
        """Close the session's sandbox. Idempotent. Raises: SandboxError."""
        return self._post("/sandbox/stop", {}, call_timeout)

    def _post(self, path: str, body: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        headers = {
            "Content-Type": "application/json",
            "x-paas-session-id": self.session_id,
            "x-paas-secret-token": self._token,
        }
        request = urllib.request.Request(  # noqa: S310 -- the endpoint is the user's own setting
            self._endpoint + path, data=json.dumps(body).encode(), headers=headers, method="POST"
        )
        # Daemons are local: a proxy for other traffic must not see these calls.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s or self._timeout_s) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            raise SandboxError(
                f"sandbox of session {self.session_id}: {error.read().decode(errors='replace')[:500]}",
                status=error.code,
                retry_after_s=float(error.headers.get("Retry-After") or 0),
            ) from None
        except (OSError, ValueError) as error:
            raise SandboxError(f"sandbox of session {self.session_id}: {error}", status=0) from error


def with_retry(
    *,
    max_attempts: int = 3,
    retry_interval: float = 10.0,
    infinite_retry_on_resource_limit: bool = True,
    exclude_methods: Sequence[str] = (),
) -> Callable[[C], C]:
    """Return a class decorator that retries a tool's calls.

    Args:
        max_attempts: Calls in all after server errors and lost connections.
        retry_interval: Seconds between them.
        infinite_retry_on_resource_limit: Whether to wait for as long as the daemon has no machine (429).
        exclude_methods: Methods that are not retried.
    """

    def decorate(kind: C) -> C:
        for name in ("sandbox_start", "sandbox_stop"):
            if name not in exclude_methods:
                setattr(kind, name, retried(getattr(kind, name)))
        return kind

    def retried(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            failures = 0
            while True:
                try:
                    return method(*arguments, **named)
                except SandboxError as error:
                    waits = error.status == _TOO_MANY and infinite_retry_on_resource_limit
                    if not waits:
                        failures += 1
                        if failures >= max_attempts or 0 < error.status < _FIRST_SERVER_ERROR:
                            raise
                    time.sleep(max(retry_interval if not waits else 0.0, error.retry_after_s))

        return call

    return decorate
