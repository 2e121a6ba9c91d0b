"""A double of AReaL's inference engine: answers as `areal.api.ModelResponse` does, with what a script says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.areal.conversation import Request
from trainer.testing.slime import END, Tokenizer


@dataclass
class ModelResponse:
    """`areal.api.ModelResponse`, the fields that the trainer reads."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"


class ScriptedEngine:
    """Knows nothing of tensors: reads ids, and says what a script says."""

    def __init__(self, say: Callable[[str], str], *, response: Callable[..., Any] = ModelResponse) -> None:
        """Take the script, from the decoded prompt to the reply's text, and what to answer with."""
        self.requests: list[Any] = []
        """What it was asked, in order."""
        self.version = 3
        self.misread = False
        """Whether it says that it read other ids than those it was given."""
        self._say = say
        self._response = response
        self._tokenizer = Tokenizer()

    async def ask(self, request: Request) -> Any:
        """Answer; a script that raises is an engine that fails."""
        return self._answer(request, request.input_ids, request.max_new_tokens)

    async def agenerate(self, request: Any) -> Any:
        """Answer an `areal.api.ModelRequest`."""
        return self._answer(request, request.input_ids, request.gconfig.max_new_tokens)

    def _answer(self, request: Any, input_ids: list[int], room: int) -> Any:
        self.requests.append(request)
        ids = self._tokenizer.encode(self._say(self._tokenizer.decode(input_ids)) + END)[:room]
        return self._response(
            input_tokens=input_ids[1:] if self.misread else list(input_ids),
            output_tokens=ids,
            output_logprobs=[-0.5 - position / 1000 for position in range(len(ids))],
            output_versions=[self.version] * len(ids),
            stop_reason="stop" if ids[-1] == self._tokenizer.convert_tokens_to_ids(END) else "length",
        )
