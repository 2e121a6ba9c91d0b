"""A real Chromium that trusts recordings as guests do sees a recorded site without it."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from envd.base.config_values import default_cache_dir
from envd.desktop.trust import _INSTALL
from envd.integrations.web.environment import AUTHORITY_CERT, WebEnvironment
from envd.integrations.web.recordings import WebRecordings
from tests.contract.test_web_recordings import Running, running_proxy
from tests.support.web_site import serve_site

ENVIRONMENT = WebEnvironment(default_cache_dir())
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not ENVIRONMENT.is_installed, reason="run `envd web install`"),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("chromium"), reason="needs root and Debian's chromium"),
]
#: In a mount namespace with a copy of /etc, where the authority is installed as in a guest, if `trusts` is not empty.
BROWSE = """\
set -e
mount --bind {directory}/etc /etc
mount --bind {directory}/authorities /usr/local/share/ca-certificates
if [ -n "{trusts}" ]; then /usr/bin/python3 {directory}/install.py < {certificate}; fi
export https_proxy=http://127.0.0.1:{port} XDG_CURRENT_DESKTOP=envd
exec chromium --headless --no-sandbox --disable-gpu --proxy-server=$https_proxy --proxy-bypass-list='<-loopback>' \\
    --user-data-dir={directory}/profile{trusts} --screenshot={directory}/screen.png --dump-dom {url}
"""


async def browse(running: Running, directory: Path, url: str, *, trusts: bool = True) -> tuple[str, bytes]:
    """Return the document of a page and a picture of it."""
    if not (directory / "etc").exists():
        shutil.copytree("/etc", directory / "etc", symlinks=True, ignore=shutil.ignore_patterns("*shadow*"))
        (directory / "authorities").mkdir()
        (directory / "install.py").write_text(_INSTALL)
    script = BROWSE.format(
        directory=directory,
        trusts="yes" if trusts else "",
        certificate=ENVIRONMENT.authority() / AUTHORITY_CERT,
        port=running.ports["m0"],
        url=url,
    )
    command = ["unshare", "--mount", "sh", "-c", script]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=200, check=True)
    picture = directory / "screen.png"
    return done.stdout, picture.read_bytes() if picture.exists() else b""


async def test_a_browser_shows_a_recorded_site_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = WebRecordings(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with serve_site(tmp_path) as port:
        url = f"https://127.0.0.1:{port}/start"
        async with running_proxy(recordings, f"127.0.0.1:{port}") as running:
            untrusted, _ = await browse(running, tmp_path, url, trusts=False)
            assert "stranger" not in untrusted
            shown = await browse(running, tmp_path, url)
    assert "<h1>Hello, a stranger</h1>" in shown[0]
    async with running_proxy(recordings, replays=True) as running:
        assert await browse(running, tmp_path, url) == shown
        missing, _ = await browse(running, tmp_path, f"{url}/none")
        assert f"GET {url}/none was not recorded." in missing
