"""E2B's own SDKs for Python and JavaScript, unmodified, on drawn desktops."""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    FilesystemEventType,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b_desktop import Sandbox as Desktop
from PIL import Image

from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from envd.integrations.osworld.catalogue import desktop_task
from tests.support.desktops import DrawnDesktops
from tests.support.program import Program

# Warnings of the SDKs are not ours.
pytestmark = pytest.mark.filterwarnings("default")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `envd compat e2b`."""
    directory = tmp_path_factory.mktemp("checkpoints")
    store = CheckpointStore(directory, settings=CheckpointsConfig(), reserve_bytes=0)
    desktops = DrawnDesktops(size=2, capacity=4, extra_tasks=[desktop_task()], checkpoints=store)
    with Program(sys.executable, "-m", "envd", "compat", "e2b=127.0.0.1:0", "--envd", desktops.address) as server:
        yield server.wait_for(r"^protocol e2b on http://(\S+)$")
        desktops.wait_returned()
    desktops.close()


@pytest.fixture(autouse=True)
def environment(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
        monkeypatch.setenv(name, f"http://{address}")
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create(timeout=120, metadata={"test": "sdk"}, envs={"A": "1"}) as sandbox:
        yield sandbox


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (HERE.parents[2] / "docs/compat.md").read_text(encoding="utf-8")
    section = page.partition("\n## `e2b`\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    code = code.replace("timeout=600", "timeout=60")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "hello\n\n"), done.stderr
    with Image.open(tmp_path / "screen.png") as picture:
        assert picture.size == (1280, 800)


def test_commands(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("echo $A; pwd", cwd="/tmp").stdout == "1\n/tmp\n"  # noqa: S108
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("cat /none; exit 3")
    assert (failed.value.exit_code, failed.value.stderr) == (3, "cat: /none: No such file or directory\n")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 60", timeout=0.3)
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("abc")
    sandbox.commands.stream_input(handle.pid, ["d", b"e"])
    handle.close_stdin()
    assert handle.wait().stdout == "abcde"
    handle = sandbox.commands.run("sleep 1; echo late", background=True)
    handle.disconnect()
    assert [each.pid for each in sandbox.commands.list()] == [handle.pid]
    assert sandbox.commands.connect(handle.pid).wait().stdout == "late\n"
    handle = sandbox.commands.run("sleep 60", background=True)
    assert handle.kill()
    assert not handle.kill()
    with pytest.raises(CommandExitException):
        handle.wait()


def test_files(sandbox: Sandbox) -> None:
    assert sandbox.files.write("a/b", "text").path == "/home/user/a/b"
    assert sandbox.files.read("a/b") == "text"
    written = sandbox.files.write_files([{"path": "/x/1", "data": b"\0\xff"}, {"path": "/x/2", "data": "2"}])
    assert [each.path for each in written] == ["/x/1", "/x/2"]
    assert bytes(sandbox.files.read("/x/1", format="bytes")) == b"\0\xff"
    data = os.urandom(20 << 20)
    sandbox.files.write("large", io.BytesIO(data))
    assert b"".join(sandbox.files.read("large", format="stream")) == data
    sandbox.files.write("packed", "z" * 1000, gzip=True)
    assert sandbox.files.read("packed", gzip=True) == "z" * 1000
    assert sandbox.files.make_dir("d/e")
    assert not sandbox.files.make_dir("d/e")
    assert [each.path for each in sandbox.files.list("a")] == ["/home/user/a/b"]
    assert sandbox.files.rename("a/b", "a/c").name == "c"
    assert sandbox.files.get_info("a/c").size == 4
    sandbox.files.remove("a")
    assert not sandbox.files.exists("a/c")
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("a/c")
    assert requests.get(sandbox.download_url("packed"), timeout=10).text == "z" * 1000
    assert requests.get(sandbox.download_url("packed", use_signature_expiration=-1), timeout=10).status_code == 401
    assert requests.post(sandbox.upload_url("up"), files={"file": b"up"}, timeout=10).status_code == 200
    watch = sandbox.files.watch_dir("/home/user", recursive=True)
    sandbox.files.write("d/new", "1")
    kinds = {event.type for event in watch.get_new_events() if event.name == "d/new"}
    assert kinds == {FilesystemEventType.CREATE, FilesystemEventType.WRITE}
    watch.stop()


def test_the_life_of_a_sandbox(sandbox: Sandbox) -> None:
    assert sandbox.is_running()
    assert sandbox.get_info().metadata == {"test": "sdk"}
    assert sandbox.get_metrics()[0].cpu_count == 1
    found = Sandbox.list(query=SandboxQuery(metadata={"test": "sdk"})).next_items()
    assert [each.sandbox_id for each in found] == [sandbox.sandbox_id]
    sandbox.files.write("note", "kept")
    assert sandbox.pause()
    assert not sandbox.pause()
    assert Sandbox.get_info(sandbox.sandbox_id).state is SandboxState.PAUSED
    with pytest.raises(SandboxNotRunningException):
        sandbox.commands.run("true")
    assert Sandbox.connect(sandbox.sandbox_id).files.read("note") == "kept"
    snapshot = sandbox.create_snapshot(name="sdk")
    assert snapshot.names == ["sdk"]
    assert snapshot in Sandbox.list_snapshots().next_items()
    with Sandbox.create(snapshot.snapshot_id) as copy:
        assert copy.files.read("note") == "kept"
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    for fork in sandbox.fork(count=2, timeout=30):
        assert isinstance(fork, Sandbox)
        assert fork.files.read("note") == "kept"
        fork.kill()
    sandbox.set_timeout(1)
    while sandbox.is_running():
        time.sleep(0.1)
    assert not sandbox.kill()
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    with pytest.raises(SandboxException, match="template 'none': not found"):
        Sandbox.create("none")
    with pytest.raises(SandboxException, match="501"):
        Sandbox.create(volume_mounts={"/data": "volume"})


def test_a_sandbox_that_is_killed_during_a_command(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 60", background=True)
    sandbox.kill()
    with pytest.raises(SandboxNotRunningException, match="killed or reached its end of life"):
        handle.wait()


async def test_the_asynchronous_sdk() -> None:
    async with await AsyncSandbox.create(timeout=60) as sandbox:
        lines: list[str] = []
        await sandbox.commands.run("echo 1; sleep 0.2; echo 2", on_stdout=lines.append)
        assert lines == ["1\n", "2\n"]
        await sandbox.files.write("a", "1")
        assert await sandbox.files.read("a") == "1"


def test_the_desktop() -> None:
    with Desktop.create(timeout=60) as desktop:
        assert Image.open(io.BytesIO(desktop.screenshot())).size == desktop.get_screen_size() == (1280, 800)
        desktop.left_click(379, 311)
        assert desktop.get_cursor_position() == (379, 311)
        desktop.write('it\'s a "desktop" of $HOME')
        desktop.press(["ctrl", "s"])
        assert desktop.files.read("note.txt") == 'it\'s a "desktop" of $HOME'
        desktop.move_mouse(400, 400)
        desktop.drag((300, 300), (320, 320))
        for act in (desktop.right_click, desktop.middle_click, desktop.double_click):
            act()
        desktop.scroll("down", 3)
        desktop.wait(100)
        window = desktop.get_current_window_id()
        assert window in desktop.get_application_windows("editor")
        assert "Editor" in desktop.get_window_title(window)
        desktop.launch("editor")
        with pytest.raises(CommandExitException, match="console"):
            desktop.stream.start()


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")
@pytest.mark.timeout(300)
def test_the_sdks_for_javascript(tmp_path: Path) -> None:
    for name in ("package.json", "usage.mjs"):
        shutil.copy(HERE / name, tmp_path)
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(["node", "usage.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
