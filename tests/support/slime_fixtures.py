"""Fixtures of the tests on slime's real code: a tiny model, and a daemon with drawn desktops."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuaenv.client import Click, Done
from tests.support.engine_contract import chat_of
from tests.support.served import ServedDaemon
from tests.support.sglang import SglangServer
from trainer.agent.grammars import grammar
from trainer.tokens.chat import Chat

__all__ = ["chat", "checkpoint", "fake_daemon", "model", "other_checkpoint"]

_SAY = grammar("qwen3-vl").render
_VOCABULARY = [_SAY([Click(640, 125, count=count)]) for count in (1, 2, 3)] + [_SAY([Done()])]
_DAEMON = """\
[hypervisor]
uri = "fake"

[pools.desktop]
image = "desktop"
size = 4
capacity = 8
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer trained on the scripted replies."""
    from trainer.learn.checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", vocabulary=_VOCABULARY * 8)


@pytest.fixture(scope="session")
def other_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    directory = tmp_path_factory.mktemp("other") / "tiny"
    shutil.copytree(checkpoint, directory)
    torch.manual_seed(1)
    Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(checkpoint)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def chat(checkpoint: Path) -> Chat:
    """The tiny model's chat format."""
    return chat_of(checkpoint)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> SglangServer:
    """The model in this process."""
    return SglangServer(checkpoint)


@pytest.fixture(scope="session")
def fake_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an `envd serve` process with drawn desktops."""
    served = ServedDaemon(tmp_path_factory.mktemp("daemon") / "state", _DAEMON)
    try:
        served.wait_for(r"pool desktop: (ready)")
        yield served.wait_for(r"listening on (\S+)")
    finally:
        served.end()
