"""The stand-in server under the contract that the real SGLang passes in `make sglang-proof`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_contract import EngineContract, chat_of
from tests.support.sglang import SglangServer
from trainer.tokens.chat import Chat

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def other_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_model import write_other_weights

    return write_other_weights(tmp_path_factory.mktemp("other") / "tiny", like=checkpoint)


@pytest.fixture(scope="module")
def chat(checkpoint: Path) -> Chat:
    return chat_of(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[SglangServer]:
    with SglangServer(checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> SglangServer:
    return SglangServer(checkpoint)


class TestStandIn(EngineContract):
    """All tests are inherited."""
