"""The daemon's container image: built by podman, run without privileges, on real machines."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuaenv.actions import TypeText
from cuaenv.client import EnvClient
from envd.base.config_values import default_cache_dir
from tests.support.program import Program

pytestmark = [pytest.mark.container, pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
BASE, IMAGE = "localhost/envd-test-base", "localhost/envd-test"
#: What docker/compose.yaml grants too.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_PTRACE")
#: For a host where systemd is not process 1 and limits cannot be raised.
PODMAN = ["podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs"]


def podman(*args: str | Path) -> str:
    done = subprocess.run([*PODMAN, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {args[0]}: {done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the image on a base of Debian packages: no registry of images is needed. Afterwards it is removed."""
    base = tmp_path_factory.mktemp("base") / "base.tar"
    # A host behind a proxy trusts the proxy's certificate.
    trust = "--customize-hook=copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs"
    command: list[str | Path] = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--include=ca-certificates",
        trust,
        "bookworm",
        base,
    ]
    subprocess.run(command, check=True)
    podman("import", "--change", "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt", base, BASE)
    base.unlink()
    context = tmp_path_factory.mktemp("context")
    files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", context], input=files, check=True)
    # The base is new each time, so stored layers would serve no later build.
    build = [
        "build",
        "--quiet",
        "--layers=false",
        "--isolation=chroot",
        "--network=host",
        "--format=docker",
        f"--build-arg=BASE={BASE}",
    ]
    try:
        podman(*build, "-f", context / "docker" / "envd.Dockerfile", "-t", IMAGE, context)
        yield IMAGE
    finally:
        podman("rmi", "--force", "--ignore", IMAGE, BASE)


class Served(Program):
    """A container that serves."""

    def __init__(self, image: str, name: str, *args: str, volumes: tuple[str, ...] = ()) -> None:
        self.name = name
        limits = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
        rights = ["--cap-drop=ALL", f"--cap-add={','.join(CAPABILITIES)}", "--security-opt=no-new-privileges"]
        mounts = [f"--volume={volume}" for volume in volumes]
        options = ["--rm", f"--name={name}", "--network=host", "--no-healthcheck"]
        super().__init__(*PODMAN, "run", *options, *limits, *rights, *mounts, image, "serve", *args)

    def stop(self, signal_name: str = "TERM") -> int:
        """Send a signal to the daemon; return its exit status."""
        podman("kill", f"--signal={signal_name}", self.name)
        return self.wait(timeout_s=300)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"envd-test-{os.getpid()}"
    yield name
    subprocess.run([*PODMAN, "rm", "--force", "--ignore", name], capture_output=True, check=False)


def test_a_group_and_a_branch_on_real_machines_without_privileges(image: str, name: str, tmp_path: Path) -> None:
    cache = default_cache_dir()
    assert (cache / "images").is_dir(), "no guest image; run `make image`"
    # QEMU's own user in the container passes through these directories.
    tmp_path.chmod(0o755)
    volumes = (f"{tmp_path}:/var/lib/envd", f"{cache}:/var/cache/envd")
    serve = ("--pool", "3", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    task = "desktop/save-shopping-list"
    with Served(image, name, *serve, volumes=volumes) as served:
        address = served.wait_for(r"listening on (\S+)", timeout_s=300)
        # A template is booted, without KVM by emulation: a busy host takes many minutes.
        served.wait_for(r"pool desktop: (ready)", timeout_s=1800)
        with EnvClient(address) as client, client.reset_group(task, size=2) as (one, other):
            assert one.observe().frame_id == other.observe().frame_id
            one.step(TypeText("in a container"))
            with client.fork(one, count=1) as (branch,):
                assert branch.observe().frame_id == one.observe().frame_id
                assert branch.parent_episode_id == one.episode_id
            assert other.evaluate().score == 0.0
        assert served.stop() == 0
    assert served.output.rstrip().endswith("stopped; nothing is left running")


def test_a_container_without_a_pool_reports_its_mistake(image: str, name: str) -> None:
    with Served(image, name, "--hypervisor", "fake", "--pool", "nothing=x") as served:
        assert served.wait(timeout_s=300) == 2
    assert "nothing=x" in served.output


def test_ctrl_c_ends_the_container(image: str, name: str) -> None:
    serve = ("--hypervisor", "fake", "--pool", "1", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    with Served(image, name, *serve) as served:
        served.wait_for(r"pool desktop: (ready)", timeout_s=300)
        assert served.stop("INT") == 0
