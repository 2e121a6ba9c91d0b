"""A model's server, by OpenAI's client: URL checks, API key, and the meaning of errors.

A context that is full ends the episode as in training and is not an error.
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from cuaenv.client.credentials import is_local
from cuaenv.problems import without_path
from trainer.agent.types import BudgetExhausted, ModelFailed
from trainer.config import InputError
from trainer.tokens.sglang import is_context_full

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

#: Statuses below 500 that the client retries.
_TRANSIENT: Final = frozenset({408, 409, 429})
#: With the client's pauses a server may be away for about 25 s.
_RETRIES: Final = 6
_CONNECT_TIMEOUT_S: Final = 10.0
#: Maximum quoted length of a server's message.
_QUOTED_CHARS = 300


def read_key(*, variable: str, file: Path | None) -> str:
    """Return the endpoint's API key from a file or, without a file, from a variable; empty if neither has one.

    The key itself cannot be an argument: command lines are visible to every user of a host.

    Raises:
        InputError: The file cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(variable, "").strip()
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"key file {file} cannot be read: {without_path(error)}") from error
    if not key:
        raise InputError(f"key file {file} is empty")
    return key


def checked_url(url: str, *, with_key: bool) -> str:
    """Return the URL without a trailing slash.

    Raises:
        InputError: It is invalid, contains a secret, or a key would be sent to another host in clear text.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InputError(f"{url!r} is not an endpoint; use a URL such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise InputError("an endpoint's URL must not contain a password or query; pass the key by variable or file")
    if with_key and parts.scheme == "http" and not _is_on_this_host(url):
        raise InputError(f"{url} is not on this host, so the key would be sent in clear text; use https")
    return url.rstrip("/")


class Endpoint:
    """One server, shared by all episodes of a run. Create it with `open_endpoint`."""

    def __init__(self, url: str, client: "openai.AsyncOpenAI") -> None:
        self.url = url
        self._client = client

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a JSON object and return the response object. Retries for a limited time.

        Raises:
            BudgetExhausted: The prompt does not fit into the model's context.
            ModelFailed: No response, or a permanent refusal.
        """
        import openai  # noqa: PLC0415

        try:
            answer = await self._client.post(path, body=body, cast_to=object)
        except openai.APIConnectionError as error:
            raise ModelFailed(f"{self._attempts(path)}: {_reason(error)}") from error
        except openai.APIStatusError as error:
            text = error.response.text
            if is_context_full(error.status_code, text):
                raise BudgetExhausted(f"the model's context is full: {_reason(error)}", budget="total") from error
            is_transient = error.status_code in _TRANSIENT or error.status_code >= 500
            problem = f"{self._attempts(path)}:" if is_transient else f"{self.url}{path} refused,"
            raise ModelFailed(f"{problem} {_reason(error)}") from error
        except ValueError as error:
            raise ModelFailed(f"{self.url}{path} did not return JSON: {error}") from error
        if not isinstance(answer, dict):
            raise ModelFailed(f"{self.url}{path} did not return a JSON object: {str(answer)[:_QUOTED_CHARS]!r}")
        return answer

    async def only_model(self) -> str:
        """Return the name of the only served model. Raises: InputError: It serves none or several."""
        remedy = (
            "give the base of its OpenAI-compatible API, such as http://127.0.0.1:8000/v1, or name the model by --model"
        )
        names = await self._served("/models", lambda found: [str(model["id"]) for model in found["data"]], remedy)
        if len(names) != 1:
            served = ", ".join(names[:8])
            raise InputError(f"{self.url} serves {len(names)} models ({served}); choose one by --model")
        return names[0]

    async def model_path(self) -> str:
        """Return the path of the model that SGLang serves, from `/get_model_info`. Raises: InputError."""
        remedy = (
            "give SGLang's base URL, such as http://127.0.0.1:30000,"
            " or name the model (trainer eval --model, trainer gateway --checkpoint)"
        )
        return await self._served("/get_model_info", lambda found: str(found["model_path"]), remedy)

    async def _served(self, path: str, read: Callable[[Any], T], remedy: str) -> T:
        try:
            return read(await self._get(path))
        except (ValueError, LookupError, TypeError) as error:
            problem = f"{self.url}{path} does not name the served model: {error}"
            raise InputError(f"{problem}; start the server, {remedy}") from error

    async def _get(self, path: str) -> Any:
        """Return a response, without retries. Raises: ValueError: There is none."""
        import openai  # noqa: PLC0415

        try:
            return await self._client.with_options(max_retries=0).get(path, cast_to=object)
        except openai.APIError as error:
            raise ValueError(_reason(error)) from error

    def _attempts(self, path: str) -> str:
        return f"{self.url}{path} did not respond in {self._client.max_retries + 1} attempts"


def _reason(error: "openai.APIError") -> str:
    """Return what went wrong, with the server's words or the cause of a failed connection."""
    status, cause = getattr(error, "status_code", None), error.__cause__
    if status is not None:
        return f"status {status}: {error.response.text[:_QUOTED_CHARS]}"  # type: ignore[attr-defined]
    return f"{type(error).__name__}: {error}" if cause is None else f"{type(cause).__name__}: {cause}"


@asynccontextmanager
async def open_endpoint(
    url: str, *, key: str = "", reply_timeout_s: float = 300.0, max_retries: int = _RETRIES
) -> AsyncIterator[Endpoint]:
    """Connect to a server for the duration of the block.

    Args:
        url: Base URL; paths such as `/chat/completions` are appended.
        key: API key; empty for none.

    Raises:
        InputError: See `checked_url`; or the client is not installed.
    """
    url = checked_url(url, with_key=bool(key))
    try:
        import openai  # noqa: PLC0415 -- most commands do not need it
    except ImportError as error:
        raise InputError("models behind HTTP need OpenAI's client; install envd-trainer[evaluate]") from error
    async with openai.AsyncOpenAI(
        api_key=key or "none",  # else the client would send the variable OPENAI_API_KEY
        base_url=url,
        timeout=openai.Timeout(reply_timeout_s, connect=_CONNECT_TIMEOUT_S),
        max_retries=max_retries,
        # A proxy from the environment cannot reach a server on this host.
        http_client=openai.DefaultAsyncHttpxClient(trust_env=not _is_on_this_host(url)),
    ) as client:
        yield Endpoint(url, client)


def _is_on_this_host(url: str) -> bool:
    return is_local(f"{urlsplit(url).hostname}:0")
