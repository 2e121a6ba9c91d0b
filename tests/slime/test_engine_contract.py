"""The stand-in server under the contract that the real SGLang passes in `make sglang-proof`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_contract import EngineContract
from tests.support.sglang import SglangServer

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[SglangServer]:
    with SglangServer(checkpoint) as server:
        yield server


class TestStandIn(EngineContract):
    """All tests are inherited."""
