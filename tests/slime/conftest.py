"""Fixtures of the tests on slime's real code: slime from `SLIME_HOME`, a tiny model, a daemon with drawn desktops."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from cuaenv.client import Click, Done

from tests.support.proofs import deselect_proof
from tests.support.served import ServedDaemon
from tests.support.slime_job import use_slime
from trainer.agent.grammars import grammar

SLIME_HOME = os.environ.get("SLIME_HOME", "")
#: The environment of the other tests has no torch.
CAN_RUN = bool(SLIME_HOME) and find_spec("torch") is not None
FAKE_DAEMON = """\
[hypervisor]
uri = "fake"

[pools.desktop]
image = "desktop"
size = 4
capacity = 8
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests without slime, with a message."""
    deselect_proof(
        config,
        items,
        marker="slime",
        can_run=CAN_RUN,
        message="slime's real code. Set SLIME_HOME to a checkout, and: make slime-proof",
    )


@pytest.fixture(scope="session", autouse=True)
def real_slime() -> None:
    """Make `import slime` find the checkout; no hub is contacted."""
    if CAN_RUN:
        os.environ["HF_HUB_OFFLINE"] = "1"
        use_slime(Path(SLIME_HOME))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer trained on the scripted replies."""
    from tests.support.tiny_model import write_checkpoint

    say = grammar("qwen3-vl").render
    said = [say([Click(640, 125, count=count)]) for count in (1, 2, 3)] + [say([Done()])]
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", vocabulary=said * 8)


@pytest.fixture(scope="session")
def fake_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an `envd serve` process with drawn desktops."""
    with ServedDaemon(tmp_path_factory.mktemp("daemon") / "state", FAKE_DAEMON) as served:
        served.wait_for(r"pool desktop: (ready)")
        yield served.wait_for(r"listening on (\S+)")
