"""The probe of an engine at the start of a job."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.slime import IMAGE, Processor, Tokenizer
from trainer.agent.types import ModelFailed
from trainer.slime import once, probe
from trainer.slime.probe import warn_of_engine
from trainer.tokens.chat import Chat

IMAGE_TOKENS = (probe._SIDE_PX // 32) ** 2


class MergingTokenizer(Tokenizer):
    """Has one id for "the"."""

    _THE = 1_000_000

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        head, found, tail = text.partition("the")
        return super().encode(head) + ([self._THE, *self.encode(tail)] if found else [])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("the" if i == self._THE else super(MergingTokenizer, self).decode([i]) for i in ids)


class Engine:
    """Counts prompt tokens as SGLang does."""

    def __init__(self, *, tokenises_again: bool = False) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self._tokenises_again = tokenises_again

    async def __call__(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        self.requests.append(payload)
        tokenizer, ids = MergingTokenizer(), list(payload["input_ids"])
        read = tokenizer.encode(tokenizer.decode(ids)) if self._tokenises_again else ids
        placeholders = read.count(tokenizer.convert_tokens_to_ids(IMAGE))
        return {"meta_info": {"prompt_tokens": len(read) + placeholders * (IMAGE_TOKENS - 1)}}


@pytest.fixture(autouse=True)
def nothing_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_done", set())


async def test_an_engine_that_keeps_ids_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine, chat = Engine(), Chat(MergingTokenizer(), Processor())
    await warn_of_engine(engine, "u", chat)
    await warn_of_engine(engine, "u", chat)
    assert len(engine.requests) == 1
    assert not caplog.records


async def test_an_engine_that_tokenises_prompts_again_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    await warn_of_engine(Engine(tokenises_again=True), "http://engine", Chat(MergingTokenizer(), Processor()))
    assert "[envd] engine http://engine: it tokenises prompts with images again" in caplog.text


async def test_models_without_images_or_merged_tokens_are_not_probed() -> None:
    engine = Engine()
    await warn_of_engine(engine, "a", Chat(MergingTokenizer()))
    await warn_of_engine(engine, "b", Chat(Tokenizer(), Processor()))
    assert not engine.requests


async def test_an_engine_that_fails_is_left_to_the_first_episode_and_probed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(payload: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ModelFailed("no response")

    await warn_of_engine(fail, "u", Chat(MergingTokenizer(), Processor()))
    assert not caplog.records
    await warn_of_engine(Engine(tokenises_again=True), "u", Chat(MergingTokenizer(), Processor()))
    assert "it tokenises prompts with images again" in caplog.text
