"""Users of tasks that a model plays, behind an endpoint of OpenAI's chat completions.

An answer that does not come is an error here; `envd.tasks.user.answer_or_nothing` decides whose.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from envd.base.clock import running_timeout
from envd.base.config import TasksConfig
from envd.base.errors import ConfigError, UserUnavailable
from envd.tasks.user import MAX_ANSWER_CHARS, Exchange

logger = logging.getLogger(__name__)

_PROMPT = (
    "You are the user of a computer. An assistant works on it for you and asks you something. Answer as this user, in"
    " one or two sentences, only what was asked. Say that you do not know what the description does not tell."
    "\n\n{persona}"
)
_MAX_TOKENS = 400
_MAX_BODY_BYTES, _CHUNK_BYTES = 1 << 20, 1 << 16
#: Pauses before attempts to repeat a request that the server did not take.
_PAUSES_S: Final = (0.5, 2.0)
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_BODY = TypeAdapter(dict[str, Any])
_CONTENT = TypeAdapter(str)


class UserModel:
    """Answers for users by an endpoint."""

    def __init__(self, settings: TasksConfig) -> None:
        """Read the key. Raises: ConfigError: The key file cannot be read."""
        self._settings = settings
        self._headers: dict[str, str] = {}
        if settings.user_key_file is not None:
            try:
                key = settings.user_key_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"tasks.user_key_file {settings.user_key_file}: cannot be read: {error}") from error
            self._headers["Authorization"] = f"Bearer {key}"

    async def answer(self, persona: str, question: str, asked: Sequence[Exchange]) -> str:
        """Return the user's answer to a question after earlier ones, at most 8192 characters; empty for none.

        Raises:
            UserUnavailable: No answer within `tasks.user_timeout_s`, or not a chat completion.
        """
        messages = [{"role": "system", "content": _PROMPT.format(persona=persona)}]
        for exchange in (*asked, Exchange(question, "")):
            messages += [
                {"role": "user", "content": exchange.question},
                {"role": "assistant", "content": exchange.answer},
            ]
        body = {
            "model": self._settings.user_model,
            "messages": messages[:-1],
            "max_tokens": _MAX_TOKENS,
            "temperature": 0.0,
        }
        try:
            async with running_timeout(self._settings.user_timeout_s):
                return await self._post(body)
        except TimeoutError as error:
            raise UserUnavailable(f"the user's model: no answer in {self._settings.user_timeout_s:g} s") from error

    async def _post(self, body: dict[str, Any]) -> str:
        import aiohttp  # noqa: PLC0415 -- most commands do not need it

        url = f"{self._settings.user_url.rstrip('/')}/chat/completions"
        problem = ""
        async with aiohttp.ClientSession(headers=self._headers) as session:
            for pause_s in (*_PAUSES_S, None):
                try:
                    async with session.post(url, json=body, allow_redirects=False) as response:
                        data = b""
                        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                            data += chunk
                            if len(data) > _MAX_BODY_BYTES:
                                raise UserUnavailable(f"the user's model: more than {_MAX_BODY_BYTES} bytes")
                        if response.status == 200:
                            return _answer(data)
                        problem = f"status {response.status}: {data[:200].decode(errors='replace')!r}"
                        if response.status not in _TRANSIENT:
                            break
                except aiohttp.ClientError as error:
                    problem = f"{type(error).__name__}: {error}"
                if pause_s is not None:
                    logger.warning("the user's model: %s; trying again", problem)
                    await asyncio.sleep(pause_s)
        raise UserUnavailable(f"the user's model: {problem}")


def _answer(data: bytes) -> str:
    """Return the text of a chat completion, empty if the model ended it so. Raises: UserUnavailable: It has none."""
    try:
        choice = _BODY.validate_json(data)["choices"][0]
        text = _CONTENT.validate_python(choice["message"]["content"]).strip()
        is_ended = choice.get("finish_reason") == "stop"
    except (ValidationError, LookupError, TypeError, AttributeError) as error:
        raise UserUnavailable("the user's model: not a chat completion") from error
    if not text and not is_ended:
        raise UserUnavailable("the user's model: an empty answer")
    return text[:MAX_ANSWER_CHARS]
