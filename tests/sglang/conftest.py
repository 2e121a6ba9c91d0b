"""Fixtures of the tests on SGLang's real server: tiny models, a daemon with drawn desktops, slime's code."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from cuaenv.client import Click, Done

from tests.support import stand_ins
from tests.support.engine_contract import chat_of
from tests.support.proofs import deselect_proof
from tests.support.served import ServedDaemon
from tests.support.sglang import SglangServer
from tests.support.sglang_process import SglangProcess
from tests.support.slime_job import use_slime
from trainer.agent.grammars import grammar
from trainer.tokens.chat import Chat

SLIME_HOME = os.environ.get("SLIME_HOME", "")
CAN_RUN = bool(SLIME_HOME) and find_spec("sglang") is not None
SAY = grammar("qwen3-vl").render
VOCABULARY = [SAY([Click(640, 125, count=count)]) for count in (1, 2, 3)] + [SAY([Done()])]
DAEMON = """\
[hypervisor]
uri = "fake"

[pools.desktop]
image = "desktop"
size = 4
capacity = 8
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests without SGLang, with a message."""
    deselect_proof(
        config,
        items,
        marker="sglang",
        can_run=CAN_RUN,
        message="SGLang. Set SLIME_HOME to a checkout of slime, and: make sglang-proof",
    )


@pytest.fixture(scope="session", autouse=True)
def real_slime() -> None:
    """Make `import slime` find the checkout; no hub is contacted."""
    if CAN_RUN:
        os.environ["HF_HUB_OFFLINE"] = "1"
        use_slime(Path(SLIME_HOME))
        # SGLang runs in processes of its own; slime needs only a few of its names here.
        stand_ins.install(replacing=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    from tests.support.tiny_model import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", vocabulary=VOCABULARY * 8)


@pytest.fixture(scope="session")
def other_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    from tests.support.tiny_model import write_other_weights

    return write_other_weights(tmp_path_factory.mktemp("other") / "tiny", like=checkpoint)


@pytest.fixture(scope="session")
def chat(checkpoint: Path) -> Chat:
    return chat_of(checkpoint)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> SglangServer:
    """The model in this process."""
    return SglangServer(checkpoint)


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangProcess]:
    """SGLang as it is installed."""
    with SglangProcess(checkpoint, tmp_path_factory.mktemp("engine") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an `envd serve` process with drawn desktops."""
    with ServedDaemon(tmp_path_factory.mktemp("daemon") / "state", DAEMON) as served:
        served.wait_for(r"pool desktop: (ready)")
        yield served.wait_for(r"listening on (\S+)")
