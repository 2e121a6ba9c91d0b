"""Containers of an ordinary user: real desktops without root, and without control groups of the user's own.

The user exists in a mount namespace of the test alone, with its own copies of `/etc/passwd`, `/etc/subuid` and others.
So nothing of the host changes, and no host needs such a user.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from envd.base.config import Config
from envd.images.catalogue import ImageCatalogue
from tests.support.containers import desktop_image

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
USER, UID, FIRST_SUBORDINATE_ID = "envd-test", 61234, 1_900_000_000
#: Of the user's namespace: files in the place of the host's, the code, then the image's, which the user cannot reach.
_ENTER = """
cd "$1"
for file in passwd group subuid subgid; do mount --bind $file /etc/$file; done
mount --rbind "$2" code
mount --rbind "$3" packages
mount --rbind "$4" image
shift 4
exec setpriv --reuid=61234 --regid=61234 --init-groups --inh-caps=-all env -i "$@"
"""


class OrdinaryUser:
    """Runs commands as a user with 65,536 subordinate ids and no other rights."""

    def __init__(self, directory: Path, image: Path) -> None:
        """Create the user's home in a directory that everybody may enter."""
        self._directory = directory
        self._image = image
        self.home = directory / "home"
        for name in ("code", "packages", "image", "home"):
            (directory / name).mkdir()
        os.chown(self.home, UID, UID)
        lines = {
            "passwd": f"{USER}:x:{UID}:{UID}::{self.home}:/bin/sh\n",
            "group": f"{USER}:x:{UID}:\n",
            "subuid": f"{USER}:{FIRST_SUBORDINATE_ID}:65536\n",
            "subgid": f"{USER}:{FIRST_SUBORDINATE_ID}:65536\n",
        }
        for name, line in lines.items():
            (directory / name).write_text(Path("/etc", name).read_text() + line)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the home directory."""
        places: Sequence[str | Path] = (self._directory, ROOT, sysconfig.get_path("purelib"), self._image)
        paths = ":".join(str(self._directory / name) for name in ("code", "code/proto", "packages"))
        variables = (
            f"HOME={self.home}",
            f"PYTHONPATH={paths}",
            "PATH=/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONDONTWRITEBYTECODE=1",
        )
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _ENTER, "sh"]
        return subprocess.run(
            [*enter, *places, *variables, "sh", "-ec", 'cd && exec "$@"', "sh", *command],
            capture_output=True,
            text=True,
            check=False,
        )

    def envd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("/usr/bin/python3", "-m", "envd", *arguments)


@pytest.fixture(scope="module")
def user() -> Iterator[OrdinaryUser]:
    image = desktop_image()
    program = "import sys; print(*sys.version_info[:2])"
    version = subprocess.run(["/usr/bin/python3", "-c", program], capture_output=True, text=True, check=True).stdout
    assert version.split() == [str(part) for part in sys.version_info[:2]], "the packages are for another Python"
    with tempfile.TemporaryDirectory(prefix="envd-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        user = OrdinaryUser(Path(directory), image.disk.parent)
        # As `envd image build` leaves it for the user who runs sudo.
        copied = user.home / f".cache/envd/images/desktop/{image.disk.parent.name}"
        disk = f"{directory}/image/{image.disk.name}"
        done = user.run(
            "sh", "-ec", f"mkdir -p {copied} && ln -s {copied.name} {copied.parent}/current && ln -s {disk} {copied}/"
        )
        assert done.returncode == 0, done.stderr
        for file in image.disk.parent.iterdir():
            if file.is_file() and not file.name.startswith(".") and file.name != image.disk.name:
                (copied / file.name).write_bytes(file.read_bytes())
        yield user


def test_the_host_gives_the_user_containers_without_control_groups(user: OrdinaryUser) -> None:
    found = {
        each["name"]: each
        for each in json.loads(user.envd("doctor", "--hypervisor", "oci:", "--json").stdout)["checks"]
    }
    assert f"containers of user {UID}" in found["containers"]["detail"]
    assert found["containers"]["status"] == "warn"
    assert "Delegate=yes" in found["containers"]["fix"]
    assert (found["unpacking"]["status"], found["unpacking"]["detail"]) == ("ok", "desktop: can be unpacked")
    # Other programs may listen on the default ports.
    failed = {name for name, each in found.items() if each["status"] == "fail"}
    assert failed <= {"listen", "metrics_listen"}, found


def test_a_task_is_solved_and_scored_and_nothing_is_left(user: OrdinaryUser) -> None:
    done = user.envd("tasks", "verify", "desktop/type-unicode", "--hypervisor", "oci:", "--state-dir", "s", "--json")
    report = json.loads(done.stdout)
    assert (report["accelerator"], report["oracle_ok"], report["null_ok"]) == ("native", 1, 1), done.stderr
    unpacked = user.home / f".cache/envd/images/desktop/current/container-{UID}-{FIRST_SUBORDINATE_ID}"
    assert (unpacked / "home/user").stat().st_uid == FIRST_SUBORDINATE_ID + 999
    removed = user.envd("image", "rm", "desktop")
    assert removed.returncode == 0, removed.stderr
    assert not (user.home / ".cache/envd/images/desktop").exists()
    assert ImageCatalogue(Config().cache_dir).get("desktop"), "the host's own image stays"
