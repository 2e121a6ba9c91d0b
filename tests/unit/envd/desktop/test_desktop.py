"""The desktop as a whole: readiness, a lost machine, a dropped display, the two typing methods."""

import asyncio
import base64
import gc
import io
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from PIL import Image
from pydantic import JsonValue

from cuaenv.actions import Action, Click, Done, Fail, KeyDown, KeyUp, Move, PressKeys, TypeText, Wait
from cuaenv.frames import TiledImage
from cuaenv.region import Region
from cuaenv.results import CommandResult
from envd.base.config import SettlePolicy
from envd.base.errors import GuestError, GuestUnresponsive, InvalidRequest, MachineLost
from envd.desktop.desktop import Desktop
from envd.desktop.display import frames
from envd.desktop.display.screen import Screen
from envd.desktop.guestd import KeyboardLayout, PointerState, SessionInfo
from envd.desktop.observation import (
    A11yFormat,
    Encoding,
    Keyframe,
    Observation,
    ObservationOptions,
    Point,
    SettleResult,
)
from envd.desktop.settler import settle
from tests.support.clock import until
from tests.support.display import QUICK_PAUSES, FakeDisplay, pseudo_rect

QUICK = SettlePolicy(quiet_ms=20, max_ms=60_000)


class FakeGuestd:
    """Replaces the client of the in-guest service: records its calls."""

    def __init__(self, base_url: str, *, lost: asyncio.Event) -> None:
        self.base_url = base_url
        self.calls: list[tuple[Any, ...]] = []
        self.problems = ["no window manager"]
        self.version = "1"
        self.pointer_at = (0, 0)
        self.on_its_way: list[tuple[int, int]] = []
        self.closed = False
        self.keyboard_state: KeyboardLayout | None = None
        self.keyboard_error: Exception | None = None
        self.typing_problem = ""

    async def session(self, *, timeout_s: float) -> SessionInfo:
        problem = self.problems.pop(0) if self.problems else ""
        return SessionInfo(
            ready=not problem, display=":0", window_manager="wm", windows=(), version=self.version, problem=problem
        )

    async def pointer(self) -> PointerState:
        self.calls.append(("pointer",))
        if self.on_its_way:
            self.pointer_at = self.on_its_way.pop(0)
        return PointerState(
            x_px=self.pointer_at[0], y_px=self.pointer_at[1], buttons=frozenset(), modifiers=frozenset()
        )

    async def keyboard(self, *, timeout_s: float) -> KeyboardLayout | None:
        if self.keyboard_error is not None:
            raise self.keyboard_error
        return self.keyboard_state

    async def type_text(self, text: str, *, held: Sequence[int], timeout_s: float) -> str:
        self.calls.append(("type_text", text, *held))
        return self.typing_problem

    async def execute(self, argv: Sequence[str], *, timeout_s: float, **others: Any) -> CommandResult:
        self.calls.append(("execute", tuple(argv)))
        stdout = b"/home/someone\n" if argv[0] == "printenv" else b"out"
        return CommandResult(exit_code=0, stdout=stdout, stderr=b"")

    async def launch(self, argv: Sequence[str], *, timeout_s: float) -> None:
        self.calls.append(("launch", tuple(argv)))

    async def write_file(self, path: str, data: bytes) -> None:
        self.calls.append(("write_file", path, data))

    async def accessibility(self, *, showing: bool) -> str:
        return "<tree/>"

    async def terminal(self) -> str | None:
        return "$ "

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeChannels:
    """The channels of a machine with a drawn screen and a scripted agent."""

    display: FakeDisplay = field(default_factory=lambda: FakeDisplay(640, 480))
    guestd_url: str | None = "http://127.0.0.1:1"
    machine_id: str = "m1"
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    lost_reason: str = ""
    pings_to_miss: int = 2
    commands: list[tuple[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    guest_exit_code: int = 0
    processor_readings: list[float] = field(default_factory=list)
    reacts_before_answer: bool = False

    def processor_s(self) -> float | None:
        """Return the next reading, repeating the last one; None without readings."""
        if len(self.processor_readings) > 1:
            return self.processor_readings.pop(0)
        return self.processor_readings[0] if self.processor_readings else None

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.lost.is_set():
            raise MachineLost("gone")
        return await self.display.connect()

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        self.commands.append((command, arguments))
        match command:
            case "guest-ping" if self.pings_to_miss:
                self.pings_to_miss -= 1
                raise GuestUnresponsive("no answer")
            case "guest-exec":
                return {"pid": 1}
            case "guest-exec-status":
                return {
                    "exited": True,
                    "exitcode": self.guest_exit_code,
                    "out-data": base64.b64encode(b"root").decode(),
                }
            case "guest-file-open":
                assert arguments
                path = str(arguments["path"])
                if arguments["mode"] == "r" and path not in self.files:
                    raise GuestError(f"failed to open file '{path}' (mode: 'r'): No such file or directory")
                return 7
            case "guest-file-read":
                data = self.files["/home/someone/notes.txt"]
                return {"buf-b64": base64.b64encode(data).decode(), "count": len(data), "eof": True}
            case "guest-file-write":
                assert arguments
                return {"count": len(base64.b64decode(str(arguments["buf-b64"])))}
        return {}

    def lose(self) -> None:
        self.lost_reason = "QEMU exited with 137"
        self.lost.set()


@pytest.fixture
def channels() -> FakeChannels:
    return FakeChannels()


@pytest.fixture
async def desk(
    request: pytest.FixtureRequest, channels: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Desktop]:
    monkeypatch.setattr("envd.desktop.session.GuestdClient", FakeGuestd)
    desk = Desktop(channels, pauses=getattr(request, "param", QUICK_PAUSES))
    yield desk
    await desk.close()
    await channels.display.close()


def guestd_of(desk: Desktop) -> FakeGuestd:
    guestd: object = desk._session._guestd
    assert isinstance(guestd, FakeGuestd)
    return guestd


# Readiness


async def test_an_agent_that_does_not_answer_and_a_session_that_does_not_come_up_are_named(
    desk: Desktop, channels: FakeChannels
) -> None:
    channels.pings_to_miss = 10**6
    with pytest.raises(GuestUnresponsive, match=r"m1 .*0\.05 s: .*no answer"):
        await desk.wait_ready(timeout_s=0.05)
    channels.pings_to_miss = 0
    guestd_of(desk).problems = ["no window manager is running"] * 10**4
    with pytest.raises(GuestUnresponsive, match="no window manager"):
        await desk.wait_ready(timeout_s=1.0)


@pytest.mark.parametrize("desk", [replace(QUICK_PAUSES, boot_quiet_ms=60_000)], indirect=True)
async def test_a_screen_that_always_moves_is_named(desk: Desktop, channels: FakeChannels) -> None:
    async def flicker() -> None:
        colour = 0
        while True:
            colour += 1
            channels.display.draw(100, 100, 5, 5, colour)
            await asyncio.sleep(0.002)

    task = asyncio.create_task(flicker())
    with pytest.raises(GuestUnresponsive, match="screen"):
        await desk.wait_ready(timeout_s=1.0)
    task.cancel()


# A lost machine


@pytest.mark.parametrize(
    "call",
    [
        lambda desk: desk.wait_ready(timeout_s=60),
        lambda desk: desk.settle(SettlePolicy(quiet_ms=60_000, max_ms=60_000)),
        lambda desk: desk.act(Wait(timedelta(seconds=60))),
        lambda desk: desk.act(PressKeys(keys=("a",), hold=timedelta(seconds=30))),
        lambda desk: desk.frame(refresh=True),
        lambda desk: desk.observe(ObservationOptions(), refresh=True),
    ],
)
async def test_every_wait_ends_at_once_when_the_machine_is_lost(
    desk: Desktop, channels: FakeChannels, call: Callable[[Desktop], Awaitable[object]]
) -> None:
    await desk.frame()
    channels.display.frozen = True
    channels.pings_to_miss = 10**6
    task = asyncio.ensure_future(call(desk))
    await asyncio.sleep(0.02)
    assert not task.done()
    channels.lose()
    with pytest.raises(MachineLost, match=r"m1 .*QEMU exited with 137"):
        await asyncio.wait_for(task, 25)  # shorter than any of the waits


async def test_a_display_that_ends_before_the_loss_is_known_is_a_lost_machine(
    desk: Desktop, channels: FakeChannels
) -> None:
    await desk.frame()
    task = asyncio.create_task(desk.act(PressKeys(keys=("a",), hold=timedelta(seconds=30))))
    async with asyncio.timeout(30):
        while not channels.display.keys:  # until the key is held
            await asyncio.sleep(0)
    channels.lost_reason = "QEMU exited"
    channels.display.drop()
    channels.lost.set()
    with pytest.raises(MachineLost, match="QEMU exited"):
        await task


@pytest.mark.parametrize("action", [Done(), Wait(timedelta(seconds=0)), Move(1, 1)])
async def test_a_lost_machine_rejects_actions(desk: Desktop, channels: FakeChannels, action: Action) -> None:
    channels.lose()
    with pytest.raises(MachineLost):
        await desk.act(action)


# The display connection


async def test_a_dropped_display_is_reconnected_with_the_held_keys(desk: Desktop, channels: FakeChannels) -> None:
    await desk.act(KeyDown(key="shift"))
    before = await desk.frame()
    channels.display.drop()
    after = await desk.frame(refresh=True)
    assert channels.display.connection_count == 2
    assert after.image is before.image
    assert [(key.scancode, key.down) for key in channels.display.keys] == [(0x2A, True), (0x2A, True)]


async def test_a_refresh_is_repeated_if_the_display_drops_during_it(desk: Desktop, channels: FakeChannels) -> None:
    await desk.frame()
    channels.display.frozen = True
    task = asyncio.create_task(desk.frame(refresh=True))
    await asyncio.sleep(0.01)
    channels.display.drop()
    channels.display.frozen = False
    assert (await asyncio.wait_for(task, 60)).width_px == 640


async def test_input_cut_off_by_a_dropped_display_is_an_error_and_not_repeated(
    desk: Desktop, channels: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.frame()
    client = await desk._display.client()
    held, release = asyncio.Event(), asyncio.Event()

    async def sleep(duration_s: float) -> None:
        if duration_s:  # the hold; pauses after keys are 0 here
            held.set()
            await release.wait()

    monkeypatch.setattr(desk._input, "_sleep", sleep)
    task = asyncio.create_task(desk.act(PressKeys(keys=("a",), hold=timedelta(seconds=30))))
    async with asyncio.timeout(30):
        await held.wait()
        channels.display.drop()
        while not client._writer.is_closing():
            await asyncio.sleep(0)
    release.set()
    with pytest.raises(GuestError, match="dropped"):
        await task
    await desk.act(KeyUp(key="a"))
    presses = [key for key in channels.display.keys if key.scancode == 0x1E and key.down]
    assert len(presses) <= 2  # the agent's and the restored one


async def test_an_unusable_display_raises_an_error_with_the_reason(desk: Desktop, channels: FakeChannels) -> None:
    channels.display._greeting = b"RFB 003.003\n"
    with pytest.raises(GuestError, match="only RFB"):
        await desk.frame()


async def test_a_relative_pointer_is_a_guest_error(desk: Desktop, channels: FakeChannels) -> None:
    await desk.frame()
    channels.display.send(pseudo_rect(-257, 0, 0, 640, 480))
    await desk.frame(refresh=True)  # after the rectangle
    with pytest.raises(GuestError, match="tablet"):
        await desk.act(Move(1, 1))
    assert (await desk.act(PressKeys(keys=("a",)))).error == ""


# Acting


async def test_an_invalid_action_is_reported_as_data_and_nothing_is_sent(desk: Desktop, channels: FakeChannels) -> None:
    outcome = await desk.act(Click(640, 0))
    assert "off the screen" in outcome.error
    assert (await desk.act(PressKeys(keys=("bogus",)))).error == "no key is named 'bogus'"
    assert (await desk.act(Wait(timedelta(seconds=-1)))).error != ""
    assert (await desk.act(TypeText(text="\x00"))).error != ""
    await desk.frame(refresh=True)
    assert channels.display.pointers == []
    assert channels.display.keys == []
    assert guestd_of(desk).calls == []


async def test_done_and_fail_do_nothing(desk: Desktop, channels: FakeChannels) -> None:
    assert (await desk.act(Done(answer="x"))).error == ""
    assert (await desk.act(Fail())).error == ""
    assert channels.display.connection_count == 0


async def test_the_keyboard_types_short_text_and_guestd_long_text(desk: Desktop, channels: FakeChannels) -> None:
    await desk.act(TypeText(text="abc"))
    await desk.act(TypeText(text="naïve"))
    await desk.act(TypeText(text="x" * 100))
    await desk.frame(refresh=True)
    assert [key.keysym for key in channels.display.keys if key.down] == [ord("a"), ord("b"), ord("c")]
    assert [call[1] for call in guestd_of(desk).calls if call[0] == "type_text"] == ["naïve", "x" * 100]


async def test_the_keyboard_types_if_the_service_cannot(desk: Desktop, channels: FakeChannels) -> None:
    guestd_of(desk).version = ""
    await desk.wait_ready(timeout_s=60.0)
    await desk.act(TypeText(text="hello, world"))
    await desk.frame(refresh=True)
    assert len([key for key in channels.display.keys if key.down]) == 12
    assert "'é'" in (await desk.act(TypeText(text="é"))).error


async def test_text_waits_until_the_click_before_it_has_arrived(desk: Desktop, channels: FakeChannels) -> None:
    guestd = guestd_of(desk)
    await desk.act(Click(50, 60))
    guestd.on_its_way = [(0, 0), (20, 30), (50, 61)]
    before = len(guestd.calls)
    await desk.act(TypeText(text="é"))
    assert guestd.calls[before:] == [("pointer",)] * 3 + [("type_text", "é")]
    await desk.act(TypeText(text="é"))
    assert guestd.calls[before + 4 :] == [("type_text", "é")]


async def test_keys_follow_the_layout_that_the_guest_reports(desk: Desktop, channels: FakeChannels) -> None:
    guestd = guestd_of(desk)

    async def pressed(action: Action) -> list[int]:
        before = len(channels.display.keys)
        assert (await desk.act(action)).error == ""
        await desk.frame(refresh=True)
        return [key.scancode for key in channels.display.keys[before:] if key.down]

    guestd.keyboard_error = GuestError("no X session")
    assert await pressed(TypeText(text="z")) == [44]
    guestd.keyboard_error = None
    guestd.keyboard_state = KeyboardLayout(characters={"z": (21, False)}, num_lock=False)
    assert await pressed(TypeText(text="z")) == [21]
    assert await pressed(PressKeys(keys=("ctrl", "z"))) == [0x1D, 21]
    assert await pressed(PressKeys(keys=("num5",))) == [0x45, 0x4C, 0x45]
    assert await pressed(PressKeys(keys=("ctrl", "a"))) == []
    assert guestd.calls[-1] == ("type_text", "a", 0xFFE3)
    guestd.keyboard_error = GuestUnresponsive("busy")
    assert await pressed(TypeText(text="z")) == [21]


async def test_a_guest_without_a_keyboard_report_is_asked_once(desk: Desktop) -> None:
    await desk.act(TypeText(text="z"))
    guestd_of(desk).keyboard_error = RuntimeError("asked again")
    assert (await desk.act(TypeText(text="z"))).error == ""


async def test_a_text_that_was_typed_in_part_is_an_error_for_the_agent(desk: Desktop) -> None:
    guestd_of(desk).typing_problem = "only the first 2 of 3 characters were typed"
    assert (await desk.act(TypeText(text="é\r\nè"))).error == "only the first 2 of 3 characters were typed"
    assert guestd_of(desk).calls[-1] == ("type_text", "é\nè")


async def test_the_quiet_time_is_fixed_until_the_effect_of_an_activating_key_has_settled(
    desk: Desktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_ms: list[int] = []

    async def settling(screen: Screen, policy: SettlePolicy, **others: Any) -> SettleResult:
        idle_ms.append(policy.idle_ms)
        return await settle(screen, policy, **others)

    monkeypatch.setattr("envd.desktop.settler.settle", settling)
    quick = SettlePolicy(quiet_ms=20, idle_ms=10, max_ms=2000)
    rounds: list[list[Action]] = [[Move(1, 1)], [PressKeys(keys=("enter",)), Move(2, 2)], [Move(3, 3)]]
    for actions in rounds:
        for action in actions:
            await desk.act(action)
        await desk.settle(quick)
    assert idle_ms == [10, 0, 10]


async def test_settling_knows_whether_the_guest_was_idle_before_the_input(
    desk: Desktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_idle: list[bool] = []
    results = iter([True, False, True])

    async def settling(screen: Screen, policy: SettlePolicy, *, was_idle: bool, **others: Any) -> SettleResult:
        were_idle.append(was_idle)
        return SettleResult(settled=True, settle_ms=1.0, change_count=0, is_idle=next(results))

    monkeypatch.setattr("envd.desktop.settler.settle", settling)
    for _ in range(3):
        await desk.settle(SettlePolicy())
    assert were_idle == [True, True, False]


async def test_keys_after_a_click_wait_for_a_quiet_screen(
    desk: Desktop, channels: FakeChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[tuple[bool, int]] = []

    async def rest(*args: Any, **others: Any) -> SettleResult:
        result = await settle(*args, **others)
        rests.append((result.settled, len(channels.display.keys)))
        return result

    monkeypatch.setattr("envd.desktop.settler.settle", rest)
    await desk.act(Click(50, 60))
    await desk.act(PressKeys(keys=("ctrl", "a")))
    await desk.act(PressKeys(keys=("ctrl", "a")))
    await desk.frame(refresh=True)
    assert rests == [(True, 0)], "once, before the first key"
    assert len(channels.display.keys) == 8


# Observing


async def test_a_frame_after_settling_is_newer_than_the_input(desk: Desktop, channels: FakeChannels) -> None:
    await desk.frame()
    channels.display.frozen = True
    await desk.act(Click(50, 60))
    task = asyncio.create_task(desk.settle(SettlePolicy(quiet_ms=0, max_ms=0)))
    await asyncio.sleep(0.02)
    assert not task.done()
    channels.display.frozen = False
    channels.display.draw(50, 60, 2, 2, 0x00FF00)
    await task
    assert (await desk.frame()).rgb_HWC[60, 50].tolist() == [0, 255, 0]


def png_of(observation: Observation) -> Image.Image:
    assert isinstance(observation.frame.content, Keyframe)
    assert observation.frame.content.encoding is Encoding.PNG
    return Image.open(io.BytesIO(observation.frame.content.data))


async def test_an_observation_has_only_what_was_requested(desk: Desktop) -> None:
    plain = await desk.observe(ObservationOptions())
    assert (plain.a11y_tree, plain.terminal) == (None, None)
    assert png_of(plain).size == (640, 480)
    assert {"capture", "encode"} == set(plain.timings_ms)
    full = await desk.observe(
        ObservationOptions(a11y_format=A11yFormat.OSWORLD_XML, include_terminal=True, encoding=Encoding.NONE)
    )
    assert (full.a11y_tree, full.terminal, full.frame.content) == ("<tree/>", "$ ", None)


async def test_the_pointer_is_drawn_at_the_position_set(desk: Desktop, channels: FakeChannels) -> None:
    await desk.act(Move(30, 40))
    white = bytes(4) + b"\xff" * 16
    channels.display.send(pseudo_rect(-314, 0, 0, 2, 2, white))
    await desk.frame(refresh=True)
    image = png_of(await desk.observe(ObservationOptions()))
    assert image.getpixel((31, 41)) == (255, 255, 255)
    assert image.getpixel((29, 41)) == (0, 0, 0)


@pytest.fixture
def likely_settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce the likely settled picture first: on a loaded machine the wait itself may jump over that moment."""

    async def announced(
        screen: Screen, policy: SettlePolicy, *, likely_settled: Callable[[], None], **options: Any
    ) -> SettleResult:
        likely_settled()
        return await settle(screen, policy, **options)

    monkeypatch.setattr("envd.desktop.settler.settle", announced)


async def test_a_frame_is_encoded_ahead_while_the_screen_settles(
    desk: Desktop, likely_settled_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Encoding] = []

    def compress(image: TiledImage, encoding: Encoding, *, quality: int) -> bytes:
        made.append(encoding)
        return frames.compress(image, encoding, quality=quality)

    monkeypatch.setattr("envd.desktop.display.encoder.compress", compress)
    await desk.frame(refresh=True)
    assert (await desk.settle(QUICK, upcoming=ObservationOptions())).settled
    assert desk._encoding is not None
    await desk._encoding
    assert made == [Encoding.PNG]
    assert png_of(await desk.observe(ObservationOptions())).size == (640, 480)
    assert made == [Encoding.PNG], "the result was cached"


async def test_a_region_off_the_screen_fails_an_observation_and_not_the_settling_before_it(
    desk: Desktop, likely_settled_at_once: None
) -> None:
    nowhere = ObservationOptions(region=Region(x_px=700, y_px=0, width_px=5, height_px=5))
    await desk.frame(refresh=True)
    assert (await desk.settle(QUICK, upcoming=nowhere)).settled
    assert desk._encoding is not None
    await desk._encoding
    with pytest.raises(InvalidRequest):
        await desk.observe(nowhere)


# Commands and files


async def test_commands_run_in_the_session_or_as_root(desk: Desktop, channels: FakeChannels) -> None:
    assert (await desk.run(["id"], timeout_s=60.0)).stdout == b"out"
    assert (await desk.run(["id"], timeout_s=60.0, as_root=True, env={"A": "b"})).stdout == b"root"
    await desk.launch(["editor"])
    assert guestd_of(desk).calls == [("execute", ("id",)), ("launch", ("editor",))]
    executed = next(arguments for command, arguments in channels.commands if command == "guest-exec")
    assert [executed["path"], *executed["arg"]] == ["env", "A=b", "id"]


def scripts_of(channels: FakeChannels) -> list[str]:
    """The scripts that root's agent ran, by name."""
    return [arguments["arg"][-1] for command, arguments in channels.commands if command == "guest-exec"]


async def test_the_session_is_frozen_during_a_block_and_continues_however_it_ends(
    desk: Desktop, channels: FakeChannels
) -> None:
    async def fail() -> None:
        async with desk.frozen():
            assert scripts_of(channels) == ["freeze-session"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert scripts_of(channels) == ["freeze-session", "thaw-session"]


async def test_a_session_that_cannot_be_frozen_is_an_error_and_continues(desk: Desktop, channels: FakeChannels) -> None:
    channels.guest_exit_code = 1
    with pytest.raises(GuestError, match="freeze-session: exit code 1"):
        await desk.frozen().__aenter__()
    assert scripts_of(channels) == ["freeze-session", "thaw-session"]


async def test_windows_itself_is_not_frozen(channels: FakeChannels) -> None:
    desk = Desktop(channels, can_freeze=False)
    async with desk.frozen():
        pass
    assert channels.commands == []
    await desk.close()


async def test_files_are_read_by_the_agent_and_written_as_the_user_and_home_is_queried_once(
    desk: Desktop, channels: FakeChannels
) -> None:
    channels.files["/home/someone/notes.txt"] = b"\xff\xfehello"
    assert await desk.read_file("~/notes.txt") == b"\xff\xfehello"
    assert await desk.read_file("~/missing.txt") is None
    await desk.write_file("~/a/b.txt", b"data")
    assert guestd_of(desk).calls == [("execute", ("printenv", "HOME")), ("write_file", "~/a/b.txt", b"data")]


async def test_without_guestd_root_writes_and_home_is_unknown() -> None:
    channels = FakeChannels(guestd_url=None)
    desk = Desktop(channels)
    await desk.write_file("/srv/x/y.txt", b"data")
    commands = [command for command, _ in channels.commands]
    assert commands[0] == "guest-exec"
    assert "guest-file-write" in commands
    with pytest.raises(GuestError, match="no guestd"):
        await desk.read_file("~/notes.txt")
    with pytest.raises(GuestError, match="no guestd"):
        await desk.run(["id"], timeout_s=60.0)
    await desk.close()


# Closing


@pytest.mark.parametrize("drops", [False, True])
async def test_a_closed_desktop_leaves_memory_without_a_garbage_collection(
    channels: FakeChannels, *, drops: bool
) -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        desk = Desktop(channels)
        await desk.act(Move(x=5, y=5))
        await desk.settle(QUICK, upcoming=ObservationOptions())
        await desk.observe(ObservationOptions())
        if drops:  # as of a machine that ended
            channels.lost.set()
            await channels.display.close()
            await asyncio.sleep(0.05)
        await desk.close()
        left = weakref.ref(desk), weakref.ref(desk._screen)
        del desk
        await until(lambda: all(each() is None for each in left))
    finally:
        if was_enabled:
            gc.enable()
        await channels.display.close()


async def test_closing_twice_is_harmless_and_a_closed_desktop_raises_an_error(
    desk: Desktop, channels: FakeChannels
) -> None:
    await desk.frame()
    guestd = guestd_of(desk)
    await desk.close()
    await desk.close()
    assert guestd.closed
    with pytest.raises(GuestError, match="closed"):
        await desk.frame()


async def test_closing_a_desktop_of_a_lost_machine_never_fails(desk: Desktop, channels: FakeChannels) -> None:
    await desk.frame()
    channels.lose()
    channels.display.drop()
    await desk.close()
    with pytest.raises(MachineLost):
        await desk.frame()


async def test_cancelling_a_caller_leaves_the_desktop_usable(desk: Desktop, channels: FakeChannels) -> None:
    await desk.frame()
    task = asyncio.create_task(desk.settle(SettlePolicy(quiet_ms=10_000)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await desk.settle(QUICK)).settled
    assert channels.display.connection_count == 1


# Forks


@pytest.fixture
async def asleep(desk: Desktop, channels: FakeChannels) -> AsyncIterator[tuple[Desktop, FakeChannels]]:
    """A fork of the desktop that has not run yet; its parent moved the pointer."""
    await desk.act(Move(30, 40))
    await desk.act(KeyDown(key="shift"))
    wires = FakeChannels(machine_id="m2", pings_to_miss=0)
    fork = Desktop(wires, view=await desk.view(), pauses=QUICK_PAUSES)
    yield fork, wires
    await fork.close()
    await wires.display.close()


async def test_an_asleep_fork_shows_its_view_without_a_connection(
    asleep: tuple[Desktop, FakeChannels], desk: Desktop
) -> None:
    fork, wires = asleep
    seen = await fork.observe(ObservationOptions())
    assert seen.frame.content == (await desk.observe(ObservationOptions())).frame.content
    assert (await fork.observe(ObservationOptions())).frame.content is seen.frame.content, "encoded once"
    settled = await fork.settle(SettlePolicy(quiet_ms=10_000))
    assert (settled.settled, settled.settle_ms) == (True, 0.0)
    assert fork.screen_size == (640, 480)
    assert await fork.view() is await fork.view()
    assert fork.is_asleep
    assert (wires.commands, wires.display.connection_count) == ([], 0)


async def test_a_woken_fork_is_a_desktop_like_any_other(asleep: tuple[Desktop, FakeChannels]) -> None:
    fork, wires = asleep
    await fork.wake()
    commands = [command for command, _ in wires.commands]
    assert commands.index("guest-exec") > commands.index("guest-file-write")
    assert not fork.is_asleep
    assert wires.display.connection_count == 1
    await fork.wake()
    assert [command for command, _ in wires.commands] == commands, "it woke once"
    assert (await fork.settle(QUICK)).settled
    # Keys held on the parent are held on its fork.
    assert (await fork.view()).inputs.pointer == Point(30, 40)
    assert [key.scancode for key in (await fork.view()).inputs.keys] != []
    await fork.act(KeyUp(key="shift"))
    assert (await fork.view()).inputs.keys == ()


async def test_a_fork_that_cannot_be_given_its_identity_stays_asleep(asleep: tuple[Desktop, FakeChannels]) -> None:
    fork, wires = asleep
    wires.guest_exit_code = 1
    with pytest.raises(GuestError, match=r"m2: .*clock"):
        await fork.wake()
    assert fork.is_asleep


async def test_a_busy_guest_is_not_ready_yet(desk: Desktop, channels: FakeChannels) -> None:
    channels.processor_readings = [0.0, 1.0, 2.0, 3.0, 3.0]
    await desk.wait_ready(timeout_s=60.0)
    assert channels.processor_readings == [3.0]


@pytest.mark.parametrize("desk", [replace(QUICK_PAUSES, max_idle_wait_s=0.05)], indirect=True)
async def test_a_guest_that_is_always_busy_is_waited_for_a_bounded_time(desk: Desktop, channels: FakeChannels) -> None:
    channels.processor_readings = [float(reading) for reading in range(1000)]
    await desk.wait_ready(timeout_s=60.0)
    assert len(channels.processor_readings) > 900


async def test_waiting_for_an_idle_guest_ends_once_it_is_idle_or_at_the_limit(
    desk: Desktop, channels: FakeChannels
) -> None:
    channels.processor_readings = [0.0, 1.0, 2.0, 2.001, 9.0]
    await desk.wait_idle(max_wait_s=60)
    assert channels.processor_readings == [9.0]
    channels.processor_readings = [float(reading) for reading in range(1000)]
    await desk.wait_idle(max_wait_s=0.05)
    assert len(channels.processor_readings) > 900
