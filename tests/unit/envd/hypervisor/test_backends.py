"""The registry of backends: which URIs it accepts, and what each backend needs."""

import re
from pathlib import Path

import pytest

from envd.base.config import HypervisorConfig
from envd.base.config_sources import load
from envd.base.errors import ConfigError
from envd.hypervisor import qemu
from envd.hypervisor.backends import backend_of, open_hypervisor

ROOT = Path(qemu.__file__).parent.parent


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "fake",
        "qemu:///system",
        "qemu+unix:///system?socket=/run/a/sock",
        "qemu:///embed?root=/srv/envd",
        "oci:",
        "oci:/opt/runsc",
    ],
)
def test_known_hypervisors_are_accepted(uri: str) -> None:
    config = load(flags={"hypervisor.uri": uri}, check_uri=backend_of)
    assert backend_of(config.hypervisor.uri).capabilities.runs_guests == (uri != "fake")


@pytest.mark.parametrize("uri", ["xen:///", "fake:1", "oci:a b", "qemu:///other", "qemu:///embed?root=", "nonsense"])
def test_an_unknown_hypervisor_is_refused_with_its_source(uri: str) -> None:
    known = "qemu:///system, qemu+unix:///system?socket=/PATH, qemu:///embed?root=/DIR, oci:[RUNTIME], fake"
    with pytest.raises(ConfigError) as refused:
        load(environ={"ENVD_HYPERVISOR__URI": uri}, check_uri=backend_of)
    assert str(refused.value) == f"ENVD_HYPERVISOR__URI: hypervisor.uri: {uri!r} is not supported; use one of {known}"


@pytest.mark.parametrize("uri", ["", "fake", "qemu:///system"])
def test_another_daemon_shares_all_but_an_embedded_driver(uri: str) -> None:
    assert backend_of(uri).private_uri(uri) == uri
    assert backend_of("qemu:///embed?root=/srv/envd").private_uri("qemu:///embed?root=/srv/envd") == ""


async def test_only_drawn_desktops_react_late(tmp_path: Path) -> None:
    config = load(flags={"state_dir": tmp_path, "hypervisor.reaction_ms": 50})
    with pytest.raises(ConfigError, match=r"hypervisor\.reaction_ms: only drawn desktops have it; remove it"):
        await open_hypervisor(config)
    drawn = config.model_copy(update={"hypervisor": HypervisorConfig(uri="fake", reaction_ms=50)})
    await (await open_hypervisor(drawn)).close()


def test_only_the_registry_and_the_backends_know_the_schemes() -> None:
    known = re.compile(r"[\"']qemu(\+unix)?:///|uri == [\"']fake[\"']")
    backends = {path.parent for path in ROOT.parent.rglob("backend.py")}
    outside = [path for path in ROOT.parent.rglob("*.py") if not backends & set(path.parents)]
    assert len(outside) > 100
    assert [path.name for path in outside if known.search(path.read_text(encoding="utf-8"))] == []
