"""A real guest records an HTTPS site, and eight forks see the same without it."""

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import EnvClient, Episode, View
from envd.base.config_values import default_cache_dir
from envd.integrations.web.environment import WebEnvironment
from tests.support.served import ServedDaemon
from tests.support.web_site import serve_site

pytestmark = [
    pytest.mark.vm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not WebEnvironment(default_cache_dir()).is_installed, reason="run `envd web install`"),
]

CONFIG = """\
cache_dir = "{cache_dir}"

[pools.desktop]
image = "desktop"
size = {size}
capacity = 9
allow_guest_access = true
web = "{web}"
recording = "shop"
allowed_hosts = [{allowed}]

[hypervisor]
template_dir = "{template_dir}"
"""
#: argv: the site. Prints status, URL and digest of each page. The guest's own store of authorities decides about TLS.
TOUR = """\
import hashlib, http.cookiejar, json, sys, urllib.error, urllib.request
proxy = "http://127.0.0.1:3128"
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({"http": proxy, "https": proxy}), urllib.request.HTTPCookieProcessor()
)
urllib.request.proxy_bypass = lambda host: False  # the guest's no_proxy lists the address of the site
def visit(path, body=None):
    try:
        with opener.open(sys.argv[1] + path, body, timeout=60) as answer:
            return answer.status, answer.url, hashlib.sha256(answer.read()).hexdigest()
    except urllib.error.HTTPError as error:
        return error.code, error.url, error.read().decode()
pages = [("/start",), ("/home",), ("/login", b"name=ann"), ("/random",), ("/file.bin",), ("/missing",)]
print(json.dumps([visit(*page) for page in pages]))
"""
RESET_TIMEOUT = timedelta(minutes=10)
NO_FRAMES = View(encoding="none")


def tours(daemon: ServedDaemon, site: str, *, count: int) -> list[list[tuple[int, str, str]]]:
    """Tour the site in each member of a group, whose authorities include that of the recordings."""
    address = daemon.wait_for(r"listening on (\S+)", timeout_s=120)
    with (
        EnvClient(address) as client,
        client.reset_group("desktop/type-greeting", size=count, view=NO_FRAMES, timeout=RESET_TIMEOUT) as episodes,
    ):
        return [tour(episode, site) for episode in episodes]


def tour(episode: Episode, site: str) -> list[tuple[int, str, str]]:
    result = episode.run_command(["python3", "-c", TOUR, site])
    assert result.exit_code == 0, result.stderr
    return [tuple(page) for page in json.loads(result.stdout)]


def test_a_guest_records_a_site_that_eight_forks_see_without_it(
    short_dir: Path, template_dir: Path, tmp_path: Path
) -> None:
    cache_dir = short_dir / "c"
    cache_dir.mkdir()
    for name in ("images", "web"):
        (cache_dir / name).symlink_to(default_cache_dir() / name)
    fields = {"cache_dir": cache_dir, "template_dir": template_dir}
    with serve_site(tmp_path) as port:
        site = f"https://127.0.0.1:{port}"
        config = CONFIG.format(**fields, size=1, web="record", allowed=f'"127.0.0.1:{port}"')
        daemon = ServedDaemon(short_dir / "r", config, SSL_CERT_FILE=str(tmp_path / "ca.pem"))
        try:
            (recorded,) = tours(daemon, site, count=1)
        finally:
            assert daemon.end() == 0
    assert [page[0] for page in recorded] == [200, 200, 200, 200, 200, 404]
    daemon = ServedDaemon(short_dir / "p", CONFIG.format(**fields, size=8, web="replay", allowed=""))
    try:
        assert tours(daemon, site, count=8) == [recorded] * 8
        (missing,) = tours(daemon, f"{site}/none", count=1)
        assert [page[0] for page in missing] == [504] * 6
        assert f"GET {site}/none/start was not recorded." in missing[0][2]
    finally:
        assert daemon.end() == 0
    assert os.listdir(cache_dir / "assets" / "web") == ["shop.warc.gz"]
