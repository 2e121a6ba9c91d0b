"""Options and progress lines of `envd serve`."""

from dataclasses import replace
from pathlib import Path

import pytest

from envd.base.errors import ConfigError
from envd.cli.options import load_config
from envd.cli.serve import is_ready, progress_line
from envd.pool.backoff import BreakerState
from tests.support.command import run_envd
from tests.support.stub_episodes import pool_info

STARTING = pool_info(2, name="desktop", image="debian", accelerator="tcg", starting_count=2)


def test_the_progress_of_a_pool_is_printed_from_its_first_machine_to_its_last() -> None:
    preparing = "pool desktop: preparing the template that its machines are forked from"
    slow = "; without KVM one that is not stored yet boots for minutes, on a busy host for many"
    assert progress_line(STARTING, size=2) == preparing + slow
    assert progress_line(replace(STARTING, accelerator="kvm"), size=2) == preparing
    forking = replace(STARTING, template_digest="d1")
    assert progress_line(forking, size=2) == "pool desktop: 0 of 2 machines ready, 2 starting"
    one_ready = replace(forking, idle_count=1, starting_count=1)
    assert progress_line(one_ready, size=2) == "pool desktop: 1 of 2 machines ready, 1 starting"
    assert progress_line(replace(STARTING, idle_count=2), size=2) == "pool desktop: ready, 2 machines of image debian"
    failing = replace(STARTING, breaker=BreakerState.HALF_OPEN, problem="6 failures in a row: no session")
    assert progress_line(failing, size=2) == (
        "pool desktop: FAILING, no machine starts; 6 failures in a row: no session"
    )
    assert progress_line(replace(STARTING, starting_count=0), size=0).endswith("ready, 0 machines of image debian")
    assert progress_line(STARTING, size=None) == ""
    line = progress_line(replace(STARTING, template_digest="d1", problem="qemu " + "--flag " * 500), size=2)
    assert line.startswith("pool desktop: 0 of 2 machines ready, 2 starting; qemu --flag")
    assert len(line) < 320


def test_a_leased_machine_counts_as_ready() -> None:
    assert is_ready(replace(STARTING, idle_count=1, leased_count=1), size=2)
    assert not is_ready(replace(STARTING, leased_count=1), size=2)


def test_the_web_options_apply_to_every_pool_of_flags_and_file(tmp_path: Path) -> None:
    file = tmp_path / "envd.toml"
    file.write_text('[pools.a]\nsize = 1\n[pools.b]\nweb = "closed"\n')
    config = load_config(file, {"web": "replay", "recording": "shop", "pool": ["c=2"]})
    webs = {name: (pool.web, pool.recording) for name, pool in config.pools.items()}
    assert webs == dict.fromkeys("abc", ("replay", "shop"))
    with pytest.raises(ConfigError, match=r"--web: pools\.a\.web: "):
        load_config(file, {"web": "open"})


def test_a_command_that_draws_its_desktops_takes_the_fake_hypervisor_and_no_other() -> None:
    taken = run_envd("bench", "scale", "--hypervisor", "fake", "--machines", "0")
    assert (taken.status, "--machines" in taken.err) == (2, True)
    for command in (["bench", "scale"], ["quickstart"]):
        refused = run_envd(*command, "--hypervisor", "qemu:///system")
        assert (refused.status, "draws its desktops" in refused.err) == (2, True)
