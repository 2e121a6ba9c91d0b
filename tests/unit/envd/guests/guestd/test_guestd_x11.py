"""guestd on a real X server (Xvfb) with a window manager and a terminal; only the hardware is missing."""

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xcffib
import xcffib.xtest
from PIL import Image

from cuaenv.actions import PressKeys, TypeText
from envd.base.errors import GuestError, GuestUnresponsive
from envd.desktop.guestd import GuestdClient
from envd.desktop.input.keysyms import layout_of
from envd.desktop.input.plan import (
    InputEvent,
    InputState,
    KeyEvent,
    TypingMethod,
    chord_beyond_layout,
    plan,
    typing_method,
)
from envd.desktop.observation import Point
from envd.guests.guestd import keyboard
from envd.guests.guestd.guest import Guest
from envd.guests.guestd.messages import HttpError, Request
from envd.guests.guestd.routes import respond
from envd.guests.guestd.x11 import X11, Window, Xkb
from tests.support.local_guestd import serve_guestd

WIDTH, HEIGHT = 800, 600


class Session(NamedTuple):
    """An X server with guestd in it."""

    display: str
    url: str
    xvfb: subprocess.Popen[bytes]
    directory: Path


def run_session(stack: ExitStack, directory: Path, *, window_manager: bool) -> Session:
    """Start Xvfb, openbox if requested, and guestd, until `stack` closes."""
    for program in ("Xvfb", "openbox", "xterm"):
        # A missing program is a failure, not a skip: no other test proves that typed text arrives.
        assert shutil.which(program), f"{program} is not installed"

    def start(*command: str, **options: Any) -> subprocess.Popen[bytes]:
        process = stack.enter_context(subprocess.Popen(command, **options))
        stack.callback(process.terminate)
        return process

    read_fd, write_fd = os.pipe()
    size = f"{WIDTH}x{HEIGHT}x24"
    command = ("Xvfb", "-displayfd", str(write_fd), "-screen", "0", size, "-nolisten", "tcp", "-noreset")
    xvfb = start(*command, pass_fds=[write_fd], stderr=subprocess.DEVNULL)
    os.close(write_fd)
    with open(read_fd) as pipe:
        display = f":{pipe.readline().strip()}"
    opener = directory / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text('#!/bin/sh\nexec xterm -title "$(basename "$1")" -e cat\n')
    opener.chmod(0o755)
    env = {"PATH": f"{opener.parent}:{os.environ['PATH']}", "DISPLAY": display}
    if window_manager:
        start("openbox", env={**env, "HOME": str(directory)}, stderr=subprocess.DEVNULL)
    return Session(display, serve_guestd(stack, directory, env=env).url, xvfb, directory)


async def wait_until(condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        session = run_session(stack, tmp_path_factory.mktemp("session"), window_manager=True)
        patch.setenv("DISPLAY", session.display)
        yield session


@pytest.fixture
async def client(session: Session) -> AsyncIterator[GuestdClient]:
    async with GuestdClient(session.url, lost=asyncio.Event()) as client:
        deadline_s = time.monotonic() + 60
        while not (await client.session()).ready:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)
        yield client


def windows() -> list[Window]:
    """Return the managed windows, on a connection of this process."""
    with X11() as x:
        return x.windows()


def titles() -> set[str]:
    """Return the titles of the managed windows."""
    return {window.title for window in windows()}


async def open_terminal(client: GuestdClient, title: str, script: str) -> None:
    """Run a script in a terminal that has the focus."""
    await client.launch(["xterm", "-u8", "-title", title, "-e", "sh", "-c", script])
    await wait_until(lambda: any(window.title == title and window.active for window in windows()))


async def post(client: GuestdClient, route: str, /, **fields: object) -> bytes:
    """Call one of OSWorld's routes. Raises: GuestError."""
    return await client._call("POST", route, json_body=fields, timeout_s=30)


async def close_window(client: GuestdClient, title: str) -> None:
    """Close the window with this title."""
    await post(client, "/setup/close_window", window_name=title, strict=True)


class XInput:
    """Moves the pointer and presses buttons through XTEST, on a connection of its own."""

    def __init__(self, display: str) -> None:
        self._connection = xcffib.connect(display)
        self._xtest = self._connection(xcffib.xtest.key)
        self._xkb = Xkb(self._connection)

    def click(self, x: int, y: int) -> None:
        """Click the left button at a point."""
        for event, detail in ((6, 0), (4, 1), (5, 1)):  # motion, press, release
            self._xtest.FakeInput(event, detail, 0, 0, x, y, 0)
        self._connection.core.GetInputFocus().reply()

    def set_caps_lock(self, on: bool) -> None:
        """Set Caps Lock."""
        self._xkb.lock(caps_lock=on, group=0)
        self._connection.core.GetInputFocus().reply()

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()


@pytest.fixture
def x_input(session: Session) -> Iterator[XInput]:
    x_input = XInput(session.display)
    yield x_input
    x_input.close()


async def test_a_session_is_ready_once_a_window_manager_runs(client: GuestdClient) -> None:
    session = await client.session()
    assert (session.ready, session.window_manager, session.problem) == (True, "Openbox", "")
    assert json.loads(await post(client, "/screen_size")) == {"width": WIDTH, "height": HEIGHT}


async def test_typed_unicode_arrives_byte_for_byte(client: GuestdClient, session: Session, x_input: XInput) -> None:
    path = session.directory / "typed"
    line = "\tThe quick — “brown” fox: €5, é/É, <|>~^`\\ ß Ωж한 😀 e\u0301\n"
    text = (line * 40)[:1999] + "\n"
    await open_terminal(client, "typing", f"cat > {path}")
    x_input.set_caps_lock(True)
    assert await client.type_text(text) == ""
    await wait_until(lambda: path.exists() and path.stat().st_size >= len(text.encode()))
    assert path.read_bytes() == text.encode()
    assert (await client.pointer()).modifiers == {"lock"}
    x_input.set_caps_lock(False)
    # The bindings of the first text are still there for the next.
    await client.type_text("é😀\n")
    await wait_until(lambda: path.read_bytes() == (text + "é😀\n").encode())
    await close_window(client, "typing")


LAYOUTS = ("us", "de", "fr", "ru", "us(intl)", "us,ru", "jp", "br")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_text_and_keys_arrive_on_every_layout(client: GuestdClient, session: Session, layout: str) -> None:
    """XTEST presses the keys that the host plans from the report of guestd, like the keyboard of a guest."""
    path = session.directory / f"layout-{layout}"
    groups = ["-option", "grp:rwin_toggle"] if "," in layout else []
    await client.execute(["setxkbmap", layout, *groups], timeout_s=30)
    sent = b""

    async def expect(more: str) -> None:
        nonlocal sent
        sent += more.encode()
        await wait_until(lambda: path.exists() and path.stat().st_size >= len(sent))
        assert path.read_bytes() == sent

    try:
        await open_terminal(client, layout, f"stty -icanon -isig -ixon min 1; cat > '{path}'")
        if groups:
            with X11() as x:
                Xkb(x._x).lock(caps_lock=False, group=1)
                x.sync()
        state = await client.keyboard()
        assert state is not None
        keys = layout_of(state.characters)
        for text in ("zy-/@", 'it\'s "ok"', "Az1!"):
            if typing_method(text, keys_held=False, has_guestd=True, layout=keys) is TypingMethod.GUESTD:
                assert await client.type_text(text) == ""
            else:
                press(plan(TypeText(text=text), InputState(**ON_SCREEN, layout=keys)))
            await expect(text)
        action = PressKeys(keys=("ctrl", "a"))
        if chord := chord_beyond_layout(action, keys):
            assert await client.type_text(chord[1], held=[key.keysym for key in chord[0]]) == ""
        else:
            press(plan(action, InputState(**ON_SCREEN, layout=keys)))
        await expect("\x01")
        await close_window(client, layout)
    finally:
        await client.execute(["setxkbmap", "us", "-option"], timeout_s=30)


ON_SCREEN: dict[str, Any] = {"width_px": WIDTH, "height_px": HEIGHT, "pointer": Point(0, 0)}


def press(events: tuple[InputEvent, ...]) -> None:
    """Press the keys of the main block that events name by their scancodes."""
    with X11() as x:
        for event in events:
            if isinstance(event, KeyEvent):
                x.fake_key(event.key.scancode + 8, pressed=event.down)
        x.sync()


async def test_num_lock_is_reported(client: GuestdClient) -> None:
    async def num_lock() -> bool:
        state = await client.keyboard()
        assert state is not None
        return state.num_lock

    with X11() as x:
        [key] = [code for code, row in x.keyboard_map().items() if row[:1] == [0xFF7F]]
        for expected in (True, False):
            x.fake_key(key, pressed=True)
            x.fake_key(key, pressed=False)
            x.sync()
            assert await num_lock() is expected


async def test_a_key_that_no_keyboard_has_is_an_error_for_the_agent(client: GuestdClient) -> None:
    assert "0xffed" in await client.type_text("a", held=[0xFFED])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process during the block; it would outlive a test that fails while it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_program_that_reads_late_gets_every_character(client: GuestdClient, session: Session) -> None:
    path = session.directory / "late"
    text = "".join(map(chr, range(0x4E00, 0x4F2C))) + "\n"  # 300 characters need most keycodes several times
    await open_terminal(client, "late", f"echo $PPID > {path}.pid; cat > {path}")
    await wait_until(path.exists)
    pid = int(Path(f"{path}.pid").read_text())
    with stopped(pid):
        typing = asyncio.create_task(client.type_text(text))
        with X11() as x:
            await wait_until(lambda: any(0x01004E00 in row for row in x.keyboard_map().values()))
        await asyncio.wait([typing], timeout=1)  # time in which it must not bind these keys again
    assert await typing == ""
    await wait_until(lambda: path.exists() and path.stat().st_size >= len(text.encode()))
    assert path.read_text() == text
    await close_window(client, "late")


async def test_of_a_text_that_is_not_read_the_rest_is_not_typed(
    client: GuestdClient, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyboard, "_READ_TIMEOUT_S", 0.2)
    path = session.directory / "unread"
    text = "ab" + "".join(map(chr, range(0x4E00, 0x4F2C)))
    await open_terminal(client, "unread", f"echo $PPID > {path}.pid; cat > {path}")
    await wait_until(path.exists)
    pid = int(Path(f"{path}.pid").read_text())
    with stopped(pid), pytest.raises(HttpError, match="did not read its keys") as raised:
        await asyncio.to_thread(keyboard.Keyboard().type, text, 0.0)
    [typed_count, count, *_] = map(int, re.findall(r"\d+", str(raised.value)))
    assert 2 <= typed_count < count == len(text)
    await client.type_text("\n")
    await wait_until(lambda: path.exists() and path.stat().st_size > 0)
    assert path.read_text() == text[:typed_count] + "\n"
    await close_window(client, "unread")


async def test_a_key_that_is_held_for_a_second_types_one_character(client: GuestdClient, session: Session) -> None:
    path = session.directory / "held"
    await open_terminal(client, "holding", f"cat > {path}")
    with X11() as x:
        [key] = [code for code, row in x.keyboard_map().items() if row[:1] == [ord("x")]]
        with x.plain_keyboard():
            x.fake_key(key, pressed=True)
            x.sync()
            await asyncio.sleep(1)  # A server repeats a key after 0.66 s.
            x.fake_key(key, pressed=False)
    await client.type_text("\n")
    await wait_until(lambda: path.exists() and path.stat().st_size > 0)
    assert path.read_text() == "x\n"
    await close_window(client, "holding")


async def test_nothing_is_typed_of_a_text_that_cannot_be_typed(client: GuestdClient, session: Session) -> None:
    path = session.directory / "rejected"
    await open_terminal(client, "rejecting", f"cat > {path}")
    with pytest.raises(GuestError, match=r"U\+0007"):
        await client.type_text("abc\x07")
    await client.type_text("\n")
    await wait_until(lambda: path.exists() and path.stat().st_size > 0)
    assert path.read_text() == "\n"
    await close_window(client, "rejecting")


async def test_parallel_screenshots_are_all_complete(client: GuestdClient) -> None:
    screenshots = await asyncio.gather(*(client.screenshot() for _ in range(8)))
    for screenshot in screenshots:
        image = Image.open(io.BytesIO(screenshot))
        image.load()
        assert image.size == (WIDTH, HEIGHT)


async def test_a_screenshot_shows_the_pointer_at_its_position(client: GuestdClient, x_input: XInput) -> None:
    x_input.click(300, 200)
    pointer = await client.pointer()
    assert (pointer.x_px, pointer.y_px, pointer.buttons) == (300, 200, frozenset())
    with Image.open(io.BytesIO(await client.screenshot())) as image:
        around = image.crop((290, 190, 320, 220)).convert("L").getextrema()
    x_input.click(600, 400)
    with Image.open(io.BytesIO(await client.screenshot())) as image:
        without = image.crop((290, 190, 320, 220)).convert("L").getextrema()
    assert around != without
    assert without[0] == without[1]


async def test_windows_are_activated_and_closed(client: GuestdClient) -> None:
    await open_terminal(client, "one", "cat")
    await open_terminal(client, "two", "cat")
    await post(client, "/setup/activate_window", window_name="ONE")
    [active] = [window for window in windows() if window.active]
    assert (active.title, active.wm_class) == ("one", "xterm.XTerm")
    assert 0 < active.width < WIDTH
    for title in ("one", "two"):
        await close_window(client, title)
    assert not {"one", "two"} & titles()
    for route in ("/setup/activate_window", "/setup/close_window"):
        with pytest.raises(GuestError, match=r"404: .*'one'"):
            await post(client, route, window_name="one")


async def test_a_file_opens_in_its_program_unless_it_is_missing(client: GuestdClient, session: Session) -> None:
    path = session.directory / "notes é.txt"
    path.touch()
    await post(client, "/setup/open_file", path=str(path), timeout=20)
    assert titles() == {path.name}
    await close_window(client, path.name)
    with pytest.raises(GuestError, match="404"):
        await post(client, "/setup/open_file", path=f"{path}.no")


async def test_an_opened_file_without_a_window_in_time_is_an_error(client: GuestdClient, session: Session) -> None:
    await open_terminal(client, "other", "cat")
    path = session.directory / "late.txt"
    path.touch()
    problem = r"late\.txt\. Error: no window names it after 0 s; open windows: \['other'\]"
    with pytest.raises(GuestError, match=problem):
        await post(client, "/setup/open_file", path=str(path), timeout=0)
    # The window opens later.
    await wait_until(lambda: path.name in titles())
    for title in ("other", path.name):
        await close_window(client, title)


async def test_a_session_is_not_ready_before_a_required_window_shows(client: GuestdClient) -> None:
    guest = Guest(wait_windows=["XTerm"])
    request = Request("/envd/session", {}, "", b"")
    state = json.loads(respond(guest, "GET", request).body)
    assert (state["ready"], state["problem"]) == (False, "no window of class XTerm shows yet")
    await open_terminal(client, "panel", "cat")
    assert json.loads(respond(guest, "GET", request).body)["ready"] is True
    await close_window(client, "panel")


async def test_guestd_waits_for_a_window_manager_and_outlives_its_x_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bare = run_session(stack, tmp_path, window_manager=False)
        async with GuestdClient(bare.url, lost=asyncio.Event()) as client:
            state = await client.session()
            assert (state.ready, state.window_manager) == (False, None)
            bare.xvfb.kill()
            bare.xvfb.wait()
            with pytest.raises(GuestError, match="reached"):
                await client.screenshot()
            assert not (await client.session()).ready
            assert (await client.execute(["echo", "alive"], timeout_s=60.0)).stdout == b"alive\n"
        with pytest.raises(GuestUnresponsive):
            await client.session()
