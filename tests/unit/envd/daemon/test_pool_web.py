"""Which exit each pool's guests get."""

from pathlib import Path
from typing import Any

import pytest

from envd.base.config import Config, HypervisorConfig, PoolConfig
from envd.base.errors import ConfigError
from envd.base.telemetry.metrics import Metrics
from envd.daemon.web import open_web
from envd.desktop.gateway import HostExit
from tests.support.stubs import IMAGE


def config(tmp_path: Path, uri: str, **pools: PoolConfig) -> Config:
    return Config(cache_dir=tmp_path, state_dir=tmp_path, hypervisor=HypervisorConfig(uri=uri), pools=pools)


async def test_a_closed_pool_has_no_exit_and_an_open_one_reaches_public_hosts(tmp_path: Path) -> None:
    closed, listed = PoolConfig(image="a"), PoolConfig(image="a", allowed_hosts=("example.org",))
    opened = PoolConfig(image="a", web="allow")
    settings = config(tmp_path, "fake", closed=closed, listed=listed, opened=opened)
    async with open_web(settings, dict.fromkeys(settings.pools, IMAGE), Metrics()) as exits:
        assert exits["closed"] is None
        allowed = {name: web._allowed for name, web in exits.items() if isinstance(web, HostExit)}
        assert {name: each.every_public_host for name, each in allowed.items()} == {"listed": False, "opened": True}
        assert {web.authority for web in exits.values() if web} == {""}


@pytest.mark.parametrize(
    ("uri", "web", "message"),
    [
        ("fake", "replay", r"pools\.a\.web: replay needs a Linux image with guestd"),
        ("qemu:///embed?root=/none", "record", "run `envd web install`"),
    ],
    ids=["drawn desktops", "the programs are not installed"],
)
async def test_a_pool_that_cannot_record_or_replay_does_not_start(
    tmp_path: Path, uri: str, web: Any, message: str
) -> None:
    settings = config(tmp_path, uri, a=PoolConfig(image="a", web=web, recording="shop"))
    with pytest.raises(ConfigError, match=message):
        async with open_web(settings, {"a": IMAGE}, Metrics()):
            pass
