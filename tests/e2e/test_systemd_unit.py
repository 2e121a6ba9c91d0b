"""The systemd unit, started by a real systemd as process 1 of a container."""

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envd.base.config_sources import load

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "envd.service"
TEMPLATE_UNIT = ROOT / "deploy" / "systemd" / "envd@.service"
USER_UNIT = ROOT / "deploy" / "systemd" / "envd-user.service"

#: Drawn desktops, Debian's Python with this environment's packages, a short watchdog. All else is the unit's own.
DROP_IN = """
[Service]
ExecStart=
ExecStart=/usr/bin/python3 -m envd serve --hypervisor fake --pool 2
Environment=PYTHONPATH=/opt/packages:/opt/envd:/opt/envd/proto PYTHONDONTWRITEBYTECODE=1
WatchdogSec=20s
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("unit", "name"), [(UNIT, "envd.service"), (TEMPLATE_UNIT, "envd@51.service"), (USER_UNIT, "envd.service")]
)
def test_systemd_accepts_the_units(tmp_path: Path, unit: Path, name: str) -> None:
    # The program's path is checked too, and is another one here.
    copy = tmp_path / name
    copy.write_text(unit.read_text().replace("/opt/envd/.venv/bin/envd", sys.executable))
    manager = "--user" if unit == USER_UNIT else "--system"
    command: list[str | Path] = ["systemd-analyze", manager, "verify", copy]
    variables = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_ordinary_users_unit_has_control_groups_and_lets_newuidmap_gain_its_rights() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(USER_UNIT.read_text())
    service = dict(unit["Service"])
    assert service["Delegate"] == "yes"
    assert "--hypervisor oci:" in service["ExecStart"]
    assert not [
        name
        for name in service
        if name.startswith(("Protect", "NoNewPrivileges", "Private", "Restrict"))
        and not name.startswith("RestartPrevent")
    ]
    assert "User" not in service


def test_several_daemons_of_a_host_share_its_cache_and_templates_and_nothing_else() -> None:
    def environment(text: str) -> dict[str, str]:
        lines = [line.removeprefix("Environment=") for line in text.splitlines() if line.startswith("Environment=")]
        return dict(pair.split("=", 1) for line in lines for pair in line.split())

    template = TEMPLATE_UNIT.read_text()
    configs = []
    for instance in ("51", "52"):
        configs.append(load(environ=environment(template.replace("%i", instance))))
    first, second = configs
    for name in ("listen", "metrics_listen", "state_dir"):
        assert getattr(first, name) != getattr(second, name)
    assert (first.cache_dir, first.template_dir) == (second.cache_dir, second.template_dir)

    def service(text: str) -> list[str]:
        ignored = ("#", "Description=", "Environment=")
        return [line for line in text.splitlines() if not line.startswith(ignored)]

    assert service(template) == service(UNIT.read_text())


class Container:
    """A container with systemd as process 1."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until systemd runs."""
        self._process = process
        self._leader = ""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self.wait(lambda: bool(children.read_text().split()))
        self._leader = children.read_text().split()[0]
        self.wait(lambda: self.run("systemctl", "is-system-running").strip() in {"running", "degraded"})

    def run(self, *command: str) -> str:
        """Run a command in the container and return its output, errors included."""
        done = subprocess.run(
            ["nsenter", "-t", self._leader, "-a", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    def show(self, name: str) -> str:
        """Return a property of the unit."""
        return self.run("systemctl", "show", "envd", "--value", "-p", name).strip()

    def log(self) -> str:
        """Return the unit's log."""
        return self.run("journalctl", "--no-pager", "-u", "envd")

    def wait(self, done: object) -> None:
        """Wait until `done()` is true."""
        assert callable(done)
        while not done():
            assert self._process.poll() is None, "the container ended"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    root = tmp_path_factory.mktemp("systemd") / "root"
    packages = "systemd,systemd-sysv,dbus,python3,python3-venv,libvirt0"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", root], check=True
    )
    units = root / "etc" / "systemd" / "system"
    shutil.copy(UNIT, units)
    (units / "envd.service.d").mkdir()
    (units / "envd.service.d" / "test.conf").write_text(DROP_IN)
    (root / "etc" / "envd").mkdir()
    (root / "etc" / "envd" / "envd.toml").touch()
    command: list[str | Path] = [
        "systemd-nspawn",
        "--quiet",
        "--directory",
        root,
        "--register=no",
        "--keep-unit",
        "--boot",
        "--private-network",
    ]
    command += [f"--bind-ro={ROOT}:/opt/envd", f"--bind-ro={sysconfig.get_path('purelib')}:/opt/packages"]
    process = subprocess.Popen(
        [*command, "--kill-signal=SIGRTMIN+3"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield Container(process)
    finally:
        process.terminate()
        process.wait(120)


def test_the_unit_starts_is_watched_and_drains(container: Container) -> None:
    container.run("systemctl", "start", "envd")
    assert container.show("ActiveState") == "active", container.log()
    container.wait(lambda: container.show("StatusText").startswith("pool desktop: ready, 2 machines of image desktop"))
    assert container.show("OOMPolicy") == "continue"

    # A daemon that hangs is killed and started again.
    hanging = container.show("MainPID")
    container.run("systemctl", "kill", "--signal=SIGSTOP", "--kill-whom=main", "envd")
    container.wait(lambda: container.show("NRestarts") == "1" and container.show("ActiveState") == "active")
    assert container.show("MainPID") != hanging
    assert "Watchdog timeout" in container.log()

    container.run("systemctl", "stop", "envd")
    assert (container.show("Result"), container.show("ExecMainStatus")) == ("success", "0")
    assert "stopped; nothing is left running" in container.log()


def test_a_wrong_configuration_is_not_started_again_and_again(container: Container) -> None:
    container.run("sh", "-c", "echo 'no_such_key = 1' >/etc/envd/envd.toml")
    container.run("sh", "-c", "sed -i 's/--hypervisor fake/--hypervisor fake --config \\/etc\\/envd\\/envd.toml/'"
                  " /etc/systemd/system/envd.service.d/test.conf && systemctl daemon-reload")  # fmt: skip
    container.run("systemctl", "start", "envd")
    container.wait(lambda: container.show("ActiveState") == "failed")
    assert (container.show("ExecMainStatus"), container.show("NRestarts")) == ("2", "0")
    assert "no_such_key" in container.log()
