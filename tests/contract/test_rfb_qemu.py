"""The display client against a real QEMU, whose guest is a boot sector of 25 bytes: each key paints the screen.

Figures in the comments of `rfb.py`, `screen.py` and `settler.py` come from these tests.
"""

import asyncio
import io
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from pydantic import JsonValue

from cuaenv.actions import KeyDown, KeyUp, Move, PressKeys, TypeText
from envd.base.config import SettlePolicy
from envd.base.errors import GuestError, MachineLost
from envd.desktop.desktop import Desktop

pytestmark = pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="QEMU is not installed")

# mov ax,0x13; int 0x10          320x200 in 256 colours
# mov ax,0xa000; mov es,ax
# again: xor ah,ah; int 0x16     wait for a key, al = its ASCII code
# mov ah,al; xor di,di; mov cx,32000; rep stosw; jmp again
PAINTER = bytes.fromhex("b81300 cd10 b800a0 8ec0 30e4 cd16 88c4 31ff b9007d f3ab ebf1").ljust(510, b"\0") + b"\x55\xaa"

VGA = {"std": ("-device", "VGA"), "virtio": ("-device", "virtio-vga")}


class Qemu:
    """A QEMU process and the channels into it."""

    guestd_url: str | None = None
    machine_id = "qemu"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lost = asyncio.Event()
        self.lost_reason = ""

    async def start(self, vga: str, *, painter: bool) -> None:
        disk = self.directory / "disk"
        disk.write_bytes(PAINTER.ljust(1 << 20, b"\0"))
        drive = ("-drive", f"file={disk},format=raw,if=none,id=d", "-device", "virtio-blk-pci,drive=d,bootindex=0")
        self.process = await asyncio.create_subprocess_exec(
            "qemu-system-x86_64", "-nodefaults", "-machine", "q35,accel=tcg", "-m", "64", *VGA[vga],
            "-device", "virtio-keyboard-pci", "-device", "virtio-tablet-pci", *(drive if painter else ()),
            "-display", f"vnc=unix:{self.directory}/vnc", "-qmp", f"unix:{self.directory}/qmp,server=on,wait=off",
            "-trace", "input_event_key_qcode", "-D", str(self.directory / "trace"),
        )  # fmt: skip
        self._watch = asyncio.create_task(self._wait())
        async with asyncio.timeout(60):
            while True:
                with suppress(OSError):
                    self._qmp = await asyncio.open_unix_connection(self.directory / "qmp")
                    break
                await asyncio.sleep(0.02)
        await self._qmp[0].readline()
        await self.qmp("qmp_capabilities")

    async def _wait(self) -> None:
        self.lost_reason = f"QEMU exited with {await self.process.wait()}"
        self.lost.set()

    async def qmp(self, command: str, **arguments: Any) -> Any:
        reader, writer = self._qmp
        writer.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            message = json.loads(await reader.readline())
            assert "error" not in message, message
            if "return" in message:
                return message["return"]

    async def screendump(self) -> npt.NDArray[np.uint8]:
        """Return the screen as read from the display device by QEMU."""
        path = self.directory / "dump.ppm"
        await self.qmp("screendump", filename=str(path))
        return np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))

    def keys_seen(self) -> list[str]:
        """Return the key events that QEMU sent to the guest's devices, as `name down`."""
        lines = (self.directory / "trace").read_text().splitlines()
        return [line.split("key qcode ")[1].replace(", down", "") for line in lines if "key qcode" in line]

    @property
    def reacts_before_answer(self) -> bool:
        return False

    def processor_s(self) -> float | None:
        return None

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.directory / "vnc")

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        raise GuestError("a boot sector has no agent")

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self._watch
        self._qmp[1].close()


@pytest.fixture
async def qemu(tmp_path: Path) -> AsyncIterator[Qemu]:
    qemu = Qemu(tmp_path)
    yield qemu
    await qemu.stop()


@pytest.fixture
async def desk(qemu: Qemu) -> AsyncIterator[Desktop]:
    desk = Desktop(qemu)
    yield desk
    await desk.close()


async def until_painting(qemu: Qemu, desk: Desktop) -> None:
    """Wait until the boot sector has switched to graphics mode and waits for keys."""
    async with asyncio.timeout(60):
        while (await desk.frame(refresh=True)).height_px not in (200, 400) or (await desk.frame()).rgb_HWC.any():
            await asyncio.sleep(0.05)
        await desk.settle(SettlePolicy(idle_ms=0, quiet_ms=300, max_ms=5000))


async def matching_frame(qemu: Qemu, desk: Desktop) -> npt.NDArray[np.uint8]:
    """Return a frame that equals the screendumps before and after it, which a blinking text cursor can change."""
    for _ in range(50):
        before = await qemu.screendump()
        frame = await desk.frame(refresh=True)
        after = await qemu.screendump()
        if np.array_equal(before, after):
            assert np.array_equal(frame.rgb_HWC, before)
            return frame.rgb_HWC
    raise AssertionError("the screen never stayed the same")


async def next_colour(qemu: Qemu, before: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Wait until the whole screen has another colour, and return the screen."""
    async with asyncio.timeout(60):
        while np.array_equal(shown := await qemu.screendump(), before) or (shown != shown[0, 0]).any():
            await asyncio.sleep(0.01)
    return shown


@pytest.mark.parametrize("vga", VGA)
async def test_the_local_framebuffer_equals_the_screendump_of_the_firmwares_text(
    qemu: Qemu, desk: Desktop, vga: str
) -> None:
    await qemu.start(vga, painter=False)
    async with asyncio.timeout(60):
        while not (await desk.frame(refresh=True)).rgb_HWC.any():
            await asyncio.sleep(0.05)
    for _ in range(5):
        rgb_HWC = await matching_frame(qemu, desk)
        await asyncio.sleep(0.1)
    assert (rgb_HWC > 100).sum() > 1000
    assert desk.screen_size == (rgb_HWC.shape[1], rgb_HWC.shape[0])


@pytest.mark.parametrize("vga", VGA)
async def test_a_settled_frame_shows_the_effect_of_the_last_key(qemu: Qemu, desk: Desktop, vga: str) -> None:
    await qemu.start(vga, painter=True)
    await until_painting(qemu, desk)
    colours: dict[str, tuple[int, ...]] = {}
    shown = await qemu.screendump()
    for char in "abcdefghijklmABC123abc":
        await desk.act(TypeText(text=char))
        # The guest may run late, and a settle cannot detect a reaction that has not started.
        shown = await next_colour(qemu, shown)
        assert (await desk.settle(SettlePolicy(idle_ms=0, quiet_ms=100, max_ms=60_000))).settled
        rgb_HWC = (await desk.frame()).rgb_HWC
        assert np.array_equal(rgb_HWC, await qemu.screendump())
        colour = tuple(rgb_HWC[0, 0].tolist())
        assert colours.setdefault(char, colour) == colour
    assert len(set(colours.values())) > 12


async def test_a_refresh_is_correct_even_after_the_display_became_idle(qemu: Qemu, desk: Desktop) -> None:
    await qemu.start("std", painter=True)
    await until_painting(qemu, desk)
    await desk.act(TypeText(text="a"))
    await desk.settle(SettlePolicy(idle_ms=0, quiet_ms=200))
    before = await desk.frame()
    await asyncio.sleep(5)  # By now QEMU's VNC server checks the screen every 0.7 s.
    await qemu.qmp("send-key", keys=[{"type": "qcode", "data": "b"}])  # Not over VNC, which would wake the server.
    await next_colour(qemu, before.rgb_HWC)
    frame = await desk.frame(refresh=True)
    assert frame.frame_id != before.frame_id
    assert np.array_equal(frame.rgb_HWC, await qemu.screendump())


async def test_refreshing_sends_no_input_to_the_guest(qemu: Qemu, desk: Desktop) -> None:
    await qemu.start("std", painter=True)
    await until_painting(qemu, desk)
    before = await desk.frame()
    seen = qemu.keys_seen()
    for _ in range(50):
        await desk.frame(refresh=True)
    assert (await desk.frame()).image is before.image
    assert qemu.keys_seen() == seen


async def test_a_static_screen_settles_after_the_quiet_time(qemu: Qemu, desk: Desktop) -> None:
    await qemu.start("std", painter=True)
    await until_painting(qemu, desk)
    await desk.act(TypeText(text="a"))
    result = await desk.settle(SettlePolicy(idle_ms=0, quiet_ms=300, max_ms=60_000))
    assert result.settled
    assert result.settle_ms >= 300


async def test_keys_reach_the_guests_keyboard_with_their_scancodes(qemu: Qemu, desk: Desktop) -> None:
    await qemu.start("std", painter=True)
    await until_painting(qemu, desk)
    await desk.act(TypeText(text="Hi~\n"))
    await desk.act(PressKeys(keys=("ctrl", "shift", "delete")))
    await desk.act(PressKeys(keys=("super",)))
    await desk.act(KeyDown(key="Page_Up"))
    await desk.act(KeyUp(key="Page_Up"))
    await desk.frame(refresh=True)
    assert qemu.keys_seen() == [
        "shift 1", "h 1", "h 0", "shift 0", "i 1", "i 0", "shift 1", "grave_accent 1", "grave_accent 0", "shift 0",
        "ret 1", "ret 0",
        "ctrl 1", "shift 1", "delete 1", "delete 0", "shift 0", "ctrl 0",
        "meta_l 1", "meta_l 0",
        "pgup 1", "pgup 0",
    ]  # fmt: skip


async def test_a_guest_without_a_tablet_driver_rejects_positions(qemu: Qemu, desk: Desktop) -> None:
    await qemu.start("virtio", painter=True)
    await desk.frame()
    with pytest.raises(GuestError, match="tablet"):
        await desk.act(Move(1, 1))


async def test_killing_the_machine_during_a_settle_raises_machine_lost(qemu: Qemu, desk: Desktop) -> None:
    await qemu.start("std", painter=True)
    await desk.frame()
    settling = asyncio.create_task(desk.settle(SettlePolicy(idle_ms=0, quiet_ms=20_000, max_ms=20_000)))
    await asyncio.sleep(0.2)
    qemu.process.kill()
    with pytest.raises(MachineLost):
        await asyncio.wait_for(settling, 60)
