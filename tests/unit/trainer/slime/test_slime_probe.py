"""The probe of an engine at the start of a job."""

from collections.abc import Sequence

import pytest
from PIL import Image

from tests.support.slime import IMAGE, Processor, Tokenizer
from trainer.agent.types import ModelFailed, Reply
from trainer.slime import checks
from trainer.slime.checks import warn_of_engine
from trainer.slime.play.engine import SlimeEngine
from trainer.tokens.chat import Chat
from trainer.tokens.rows import Row

IMAGE_TOKENS = (checks._SIDE_PX // 32) ** 2


class MergingTokenizer(Tokenizer):
    """Has one id for "the"."""

    _THE = 1_000_000

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        head, found, tail = text.partition("the")
        return super().encode(head) + ([self._THE, *self.encode(tail)] if found else [])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("the" if i == self._THE else super(MergingTokenizer, self).decode([i]) for i in ids)


class Engine(SlimeEngine):
    """Counts prompt tokens as SGLang does."""

    def __init__(self, url: str, *, tokenises_again: bool = False, works: bool = True) -> None:
        self.url = url
        self.asked_count = 0
        self._tokenises_again = tokenises_again
        self._works = works

    def encode(self, images: Sequence[Image.Image]) -> None:
        pass

    async def sample(self, row: Row, *, limit: int) -> Reply:
        self.asked_count += 1
        if not self._works:
            raise ModelFailed("no response")
        tokenizer, ids = MergingTokenizer(), row.engine_ids
        read = tokenizer.encode(tokenizer.decode(ids)) if self._tokenises_again else ids
        placeholders = read.count(tokenizer.convert_tokens_to_ids(IMAGE))
        prompt_tokens = len(read) + placeholders * (IMAGE_TOKENS - 1)
        return Reply(token_ids=(5,), log_probs=(-1.0,), text="", finish="length", prompt_tokens=prompt_tokens)


@pytest.mark.parametrize(
    ("engine", "is_made", "said"),
    [
        (Engine("http://engine"), True, ""),
        (
            Engine("http://engine", tokenises_again=True),
            True,
            "[envd] engine http://engine: it tokenises prompts with images again",
        ),
        (Engine("http://engine", works=False), False, ""),
    ],
    ids=["it keeps ids", "it tokenises again", "it fails, which the first episode reports"],
)
async def test_an_engine_is_probed_once(
    engine: Engine, is_made: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await warn_of_engine(engine, Chat(MergingTokenizer(), Processor())) is is_made
    assert engine.asked_count == 1
    assert (said in caplog.text) if said else not caplog.records


async def test_models_without_merged_tokens_are_not_probed() -> None:
    engine = Engine("u")
    assert await warn_of_engine(engine, Chat(Tokenizer(), Processor()))
    assert not engine.asked_count
