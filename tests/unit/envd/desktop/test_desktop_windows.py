"""The desktop of a Windows guest without an in-guest service: its agent runs scripts in the session of the user."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import pytest
from pydantic import JsonValue

from cuaenv.actions import KeyDown, RunShell, TypeText
from envd.base.errors import GuestError
from envd.desktop.desktop import Desktop
from envd.desktop.observation import A11yFormat, Encoding, ObservationOptions
from tests.support.display import QUICK_PAUSES, FakeDisplay

TREE = """
<desktop-frame xmlns:s="https://accessibility.ubuntu.example.org/ns/state"
 xmlns:c="https://accessibility.ubuntu.example.org/ns/component" truncated="true">
<frame name="Save as" s:active="true" s:enabled="true" c:screencoord="(10, 20)" c:size="(300, 200)">
<push-button name="Save" s:enabled="true" c:screencoord="(20, 180)" c:size="(60, 20)"/>
<text name="File name:" s:enabled="true" s:focused="true" s:editable="true" c:screencoord="(20, 150)" c:size="(90, 20)"
>answer.txt</text>
</frame></desktop-frame>
"""


@dataclass
class WindowsChannels:
    """The channels of a Windows guest; its agent answers scripts by name."""

    display: FakeDisplay = field(default_factory=lambda: FakeDisplay(640, 480))
    guestd_url: str | None = None
    machine_id: str = "m1"
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    lost_reason: str = ""
    scripts: list[str] = field(default_factory=list)
    """The scripts that it was sent."""
    stdin: list[bytes] = field(default_factory=list)
    """Standard input of each."""
    answers: dict[str, bytes] = field(default_factory=dict)
    """Output by name of script; others fail."""

    @property
    def reacts_before_answer(self) -> bool:
        return False

    def processor_s(self) -> float | None:
        return None

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self.display.connect()

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        if command == "guest-exec":
            assert arguments
            assert arguments["path"] == "powershell.exe"
            self.scripts.append(str(cast("list[JsonValue]", arguments["arg"])[-1]))
            self.stdin.append(base64.b64decode(str(arguments.get("input-data", ""))))
            return {"pid": 1}
        assert command == "guest-exec-status"
        name = self.scripts[-1].partition("\n")[0].removeprefix("# envd: ")
        output = self.answers.get(name)
        streams = {"out-data": base64.b64encode(output or b"").decode()}
        if output is None:
            streams["err-data"] = base64.b64encode(b"no user is logged in").decode()
        return {"exited": True, "exitcode": int(output is None), **streams}


@pytest.fixture
def channels() -> WindowsChannels:
    return WindowsChannels()


@pytest.fixture
async def desk(channels: WindowsChannels) -> AsyncIterator[Desktop]:
    desk = Desktop(channels, has_powershell=True, pauses=QUICK_PAUSES)
    yield desk
    await desk.close()
    await channels.display.close()


def typed(script: str) -> str:
    """Return the value of `$text` in a command."""
    match = re.search(r"^\$text = '((?:[^']|'')*)'$", script, re.MULTILINE)
    assert match
    return match[1].replace("''", "'")


async def test_text_beyond_the_keyboard_is_typed_by_a_script(desk: Desktop, channels: WindowsChannels) -> None:
    channels.answers["type-text"] = b""
    outcome = await desk.act(TypeText("Zürich, it's 15 °C\r\n日本 🙂"))
    assert outcome.error == ""
    assert [typed(script) for script in channels.scripts] == ["Zürich, it's 15 °C\n日本 🙂"]


async def test_a_long_text_is_typed_in_parts(desk: Desktop, channels: WindowsChannels) -> None:
    channels.answers["type-text"] = b""
    text = "é'\n" * 1000
    await desk.act(TypeText(text))
    assert "".join(map(typed, channels.scripts)) == text
    # CreateProcess accepts 32,767 characters.
    assert max(map(len, channels.scripts)) < 20_000


async def test_text_beyond_the_keyboard_is_rejected_while_a_key_is_held(
    desk: Desktop, channels: WindowsChannels
) -> None:
    await desk.act(KeyDown("shift"))
    assert "held" in (await desk.act(TypeText("é"))).error
    assert channels.scripts == []


async def test_text_that_the_guest_cannot_type_is_an_error_of_the_guest(desk: Desktop) -> None:
    with pytest.raises(GuestError, match="type text: machine m1: no user is logged in"):
        await desk.act(TypeText("é"))


async def test_the_accessibility_tree_is_read_by_a_script(desk: Desktop, channels: WindowsChannels) -> None:
    channels.answers["accessibility-tree"] = TREE.encode()
    options = ObservationOptions(encoding=Encoding.NONE, a11y_format=A11yFormat.COMPACT, include_a11y_elements=True)
    seen = await desk.observe(options)
    assert seen.a11y_tree is not None
    assert seen.a11y_tree.splitlines() == [
        'frame "Save as" active (10,20,300,200)',
        '  push-button "Save" (20,180,60,20)',
        '  text "File name:" value="answer.txt" focused editable (20,150,90,20)',
        "... and more",
    ]
    assert seen.a11y_elements is not None
    assert seen.a11y_elements.is_cut


async def test_a_tree_that_cannot_be_read_is_an_error_of_the_guest(desk: Desktop, channels: WindowsChannels) -> None:
    options = ObservationOptions(encoding=Encoding.NONE, include_a11y_elements=True)
    with pytest.raises(GuestError, match="accessibility tree: machine m1: no user is logged in"):
        await desk.observe(options)
    channels.answers["accessibility-tree"] = b"Access is denied."
    with pytest.raises(GuestError, match=r"m1 .*accessibility tree: not XML"):
        await desk.observe(options)


async def test_a_guest_without_scripts_and_guestd_cannot_do_either(channels: WindowsChannels) -> None:
    desk = Desktop(channels)
    assert "has no guestd" in (await desk.act(TypeText("é"))).error
    with pytest.raises(GuestError, match=r"accessibility tree: machine m1 .*guestd"):
        await desk.observe(ObservationOptions(encoding=Encoding.NONE, include_a11y_elements=True))
    await desk.close()
    await channels.display.close()


async def test_a_tool_is_used_by_a_script_in_the_session_of_the_user(desk: Desktop, channels: WindowsChannels) -> None:
    head = base64.b64encode(b"hi\r\n").decode()
    channels.answers["use-tool"] = json.dumps({"head": head, "exit_code": -1073741819}).encode()
    outcome = await desk.use_tool(RunShell("echo hi", timedelta(seconds=120)))
    assert (outcome.error, outcome.output, outcome.exit_code) == ("", "hi\n", -1073741819)
    assert json.loads(channels.stdin[-1]) == {"op": "shell", "command": "echo hi", "timeout_s": 120.0}
    assert channels.stdin[-1].endswith(b"\n")
    assert "$wait_s = 140\n" in channels.scripts[-1]
    del channels.answers["use-tool"]
    failed = await desk.use_tool(RunShell("echo hi"))
    assert failed.error == "cannot use tools: machine m1: no user is logged in"
    assert "$wait_s = 90\n" in channels.scripts[-1]
