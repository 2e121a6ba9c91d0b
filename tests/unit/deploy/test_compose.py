"""The compose file: each daemon's health check asks that daemon, and stopping it leaves time to drain."""

import re
from pathlib import Path
from typing import Any

import yaml

from envd.base.config import Config

ROOT = Path(__file__).parents[3]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
DAEMONS = {name: service for name, service in SERVICES.items() if service.get("image") == "envd"}
PORT = re.compile(r"http://127\.0\.0\.1:(\d+)/healthz")


def metrics_port(command: list[str]) -> str:
    """Return the port of the metrics, which has the health too."""
    address = (
        command[command.index("--metrics-listen") + 1] if "--metrics-listen" in command else Config().metrics_listen
    )
    return address.rpartition(":")[2]


def test_the_health_check_of_each_daemon_asks_its_own_port() -> None:
    dockerfile = (ROOT / "docker" / "envd.Dockerfile").read_text(encoding="utf-8")
    [of_image] = PORT.findall(dockerfile)
    checked = {}
    for name, service in DAEMONS.items():
        own = service.get("healthcheck", {}).get("test", [""])[-1]
        checked[name] = PORT.findall(own) if own else [of_image]
    # They share the host's network.
    assert checked == {name: [metrics_port(service["command"])] for name, service in DAEMONS.items()}
    assert len({ports[0] for ports in checked.values()}) == len(DAEMONS) == 2


def test_a_daemon_has_time_to_drain_before_it_is_killed() -> None:
    seconds = [int(service["stop_grace_period"].removesuffix("s")) for service in DAEMONS.values()]
    assert min(seconds) >= Config().limits.drain_timeout_s + 60
