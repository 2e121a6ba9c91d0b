"""A configuration divided among shards, and the mark of the number of shards."""

from pathlib import Path

import pytest

from envd.base.config import Config, load
from envd.base.errors import ConfigError
from envd.daemon.shards.layout import clear_layout, mark_layout, require_divisible, shard_config


def config(**flags: object) -> Config:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return load(flags={"state_dir": Path("/state"), "shards": 3, "pools": {"desktop": {"size": 4}}, **dotted})


def test_every_machine_belongs_to_one_shard() -> None:
    whole = config(pools={"desktop": {"size": 4, "capacity": 8, "queue_limit": 7, "max_starting": 2}})
    pools = [shard_config(whole, index).pools["desktop"] for index in range(3)]
    assert [pool.size for pool in pools] == [2, 1, 1]
    assert [pool.capacity for pool in pools] == [3, 3, 2]
    assert [pool.queue_limit for pool in pools] == [3, 2, 2]
    assert [pool.max_starting for pool in pools] == [1, 1, 1]


def test_shards_share_no_directory_and_listen_on_private_sockets() -> None:
    whole = config(
        hypervisor__uri="qemu:///embed?root=/root",
        hypervisor__template_dir=Path("/templates"),
        hypervisor__template_memory_dir=Path("/shm"),
        hypervisor__template_limit_gib=30,
    )
    part = shard_config(whole, 2)
    assert part.listen == "unix:/state/shard-2/calls.sock"
    assert part.metrics_listen == "unix:/state/shard-2/metrics.sock"
    assert part.state_dir == Path("/state/shard-2")
    assert part.hypervisor.uri == "qemu:///embed?root=/root/shard-2"
    assert part.template_dir == Path("/templates/shard-2")
    assert part.hypervisor.template_memory_dir == Path("/shm/shard-2")
    assert part.hypervisor.template_limit_gib == 10
    assert part.shards == 1


def test_calls_from_the_supervisor_need_no_token_and_have_no_rate_limit() -> None:
    part = shard_config(config(security__tokens_file=Path("/tokens"), security__calls_per_second=5), 0)
    assert part.security.tokens_file is None
    assert part.security.calls_per_second == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pools": {}}, "no pool is configured"),
        ({"pools": {"desktop": {"size": 2}}}, "pool desktop: 2 machines cannot be divided among 3 shards; raise its"),
        (
            {"console_listen": "127.0.0.1:0"},
            "console_listen: is not available with 3 shards; remove it, or set --shards 1",
        ),
        ({"compat": "areal=127.0.0.1:0"}, "compat: is not available"),
        (
            {"listen": "unix:/run/envd.sock"},
            "listen unix:/run/envd.sock: 3 shards cannot share a Unix socket",
        ),
        ({"recording__directory": Path("/recordings")}, r"recording\.directory: is not available"),
        ({"limits__runs": {"main": {"quota": 4}}}, r"limits\.runs: quota: is not available"),
    ],
)
def test_a_configuration_that_shards_cannot_serve_is_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_divisible(config(**flags))


@pytest.mark.parametrize("count", [0, -1, 65, "two"])
def test_a_number_of_shards_out_of_range_is_refused(count: object) -> None:
    with pytest.raises(ConfigError, match="--shards"):
        config(shards=count)


def test_weights_of_runs_are_allowed() -> None:
    require_divisible(config(limits__runs={"main": {"weight": 2.0}}))


def test_only_the_same_number_of_shards_may_recover_a_state(tmp_path: Path) -> None:
    mark_layout(tmp_path, count=3)
    mark_layout(tmp_path, count=3)
    with pytest.raises(
        ConfigError, match="had --shards 3 and did not end cleanly; start and stop it once with --shards 3"
    ):
        mark_layout(tmp_path, count=1)
    clear_layout(tmp_path)
    mark_layout(tmp_path, count=1)
