"""The host's PowerShell scripts, answered by the Wine guest's agent as on Windows."""

import json
from typing import Any

import pytest

from envd.desktop.a11y import parse_tree
from envd.guests.powershell import Script, powershell
from envd.guests.wineagent.processes import USE_TOOL
from envd.guests.wineagent.scripts import Output, tree
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import GuestInspector
from envd.tasks.checkers.data import Registry
from envd.tasks.checkers.programs import ProcessRunning
from envd.tasks.queries import OpenWindow, parse_windows
from envd.tasks.values import ValueExpectation
from tests.support.stubs import StubDesktop

from .conftest import World

QUOTED = r"C:\Users\Public\it's ‘quoted’"


class AgentDesktop(StubDesktop):
    """A desktop whose commands go to an agent."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def run(self, argv: Any, *, timeout_s: float, as_root: bool = False, **more: Any) -> Any:
        """Run a command by the agent."""
        return await self.world.agent.run(argv, timeout_s=timeout_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """Read a file by the agent."""
        return await self.world.agent.read_file(path, max_bytes=max_bytes)


def inspector(world: World) -> GuestInspector:
    return GuestInspector(desktop=AgentDesktop(world), os=GuestOs.WINDOWS)


def run(world: World, script: Script, **values: str) -> Output:
    return world.scripts.run(powershell(script, **values)[1:])


def window(kind: str, text: str = "", *controls: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {"id": 1, "pid": 8, "program": "notepad.exe", "style": 0, "rect": [0, 0, 10, 10]}
    return fields | {"class": kind, "text": text, "controls": list(controls)} | more


def test_every_script_of_the_host_has_an_answer_and_any_other_fails(world: World) -> None:
    assert set(Script) - {Script.USE_TOOL} <= set(world.scripts.by_name)
    assert powershell(Script.USE_TOOL)[-1].startswith(USE_TOOL)
    for script in ("Get-Date", "# envd: unknown\n", ""):
        output = world.scripts.run(["-Command", script])
        assert output.exit_code == 1
        assert output.stderr.startswith(b"this guest has no PowerShell")
    assert world.scripts.run(["# envd: probe\n"]).stderr == b"probe: $path has no value"


async def test_a_file_is_found_with_size_and_content_and_other_things_by_kind(world: World) -> None:
    run(world, Script.MAKE_PARENT, path=f"{QUOTED}\\file.txt")
    await world.agent.write_file(f"{QUOTED}\\file.txt", b"12345")
    found = await inspector(world).find_file(f"{QUOTED}\\file.txt")
    assert (found.kind, found.data, found.size_bytes) == ("file", b"12345", 5)
    assert (await inspector(world).probe(QUOTED)).kind == "other"
    assert (await inspector(world).probe("C:\\none")).kind == "absent"


async def test_a_directory_is_made_listed_and_removed(world: World) -> None:
    run(world, Script.MAKE_DIRECTORY, path=f"{QUOTED}\\one\\two")
    await world.agent.write_file(f"{QUOTED}\\é.txt", b"")
    assert await inspector(world).list_directory(QUOTED) == frozenset({"one/", "é.txt"})
    for _ in range(2):
        assert run(world, Script.REMOVE, path=QUOTED).exit_code == 0
        assert await inspector(world).list_directory(QUOTED) is None


async def test_processes_are_listed_without_their_ending(world: World) -> None:
    world.helper_answers("processes", 'ok ["notepad.exe","Explorer.EXE","[System Process]"]')
    for program, score in (("notepad", 1.0), ("Explorer", 1.0), ("cmd", 0.0)):
        outcome = await ProcessRunning(kind="process", program=program).check(inspector(world))
        assert outcome.score == score


async def test_a_registry_value_is_passed_on_with_its_type(world: World) -> None:
    world.helper_answers("registry", 'ok {"found":true,"value":"Cr\\u00e8me"}')
    key = r"HKEY_CURRENT_USER\Control Panel\Desktop"
    checker = Registry.model_validate({"kind": "registry", "key": key, "value": "", "equals": "Crème"})
    assert isinstance(checker, ValueExpectation)
    assert (await checker.check(inspector(world))).score == 1.0
    assert world.helper_was_given("registry") == ["HKEY_CURRENT_USER", r"Control Panel\Desktop", ""]


def test_an_error_of_the_helper_and_its_end_fail_the_script(world: World) -> None:
    assert run(world, Script.LIST_PROCESSES).stderr == b"list-processes: no answer to processes"
    world.process.terminate()
    world.process.wait()
    world.shell.timeout_s = 0.01  # it is not started again here
    assert b"list-processes: the desktop" in run(world, Script.LIST_PROCESSES).stderr


def windows_of_notepad(**edit: Any) -> dict[str, Any]:
    dialog = window(
        "#32770",
        "Save As",
        window("Static", "File &name:"),
        window("Edit", "*.txt", focused=True, rect=[197, 347, 241, 14]),
        window("Button", "&Save", style=1, rect=[470, 342, 81, 23]),
        window("Button", "Read &only", style=3, checked=1),
        id=7,
    )
    main = window("Notepad", "Untitled - Notepad", window("Edit", "Hello", **edit), id=9)
    return {"foreground": 7, "windows": [dialog, main, window("Shell_TrayWnd", program="explorer.exe"), None]}


def test_windows_with_a_title_are_listed_the_top_one_last(world: World) -> None:
    world.helper_answers("windows", f"ok {json.dumps(windows_of_notepad())}")
    output = run(world, Script.LIST_WINDOWS)
    assert parse_windows(output.stdout.decode()) == (
        OpenWindow(window_id="0x00000009", wm_class="notepad.Notepad", title="Untitled - Notepad"),
        OpenWindow(window_id="0x00000007", wm_class="notepad.#32770", title="Save As"),
    )


def test_text_beyond_ascii_is_typed_by_the_helper(world: World) -> None:
    world.helper_answers("type", "ok null")
    assert run(world, Script.TYPE_TEXT, text="Crème\t𝄞\n").exit_code == 0
    assert world.helper_was_given("type") == ["Crème\t𝄞\n"]


def test_the_tree_has_the_elements_of_linux_guests_and_the_active_window_first(world: World) -> None:
    world.helper_answers("windows", f"ok {json.dumps(windows_of_notepad())}")
    output = run(world, Script.ACCESSIBILITY_TREE, limit="100", seconds="5")
    elements = parse_tree(output.stdout.decode(), screen_px=(1280, 800))
    shown = [(item.role, item.name, item.value, set(item.states)) for item in elements.items]
    assert shown[:5] == [
        ("dialog", "Save As", "", {"active"}),
        ("label", "File name:", "", set()),
        ("text", "File name:", "*.txt", {"focused", "editable"}),
        ("push-button", "Save", "", set()),
        ("check-box", "Read only", "", {"checked"}),
    ]
    assert ("text", "", "Hello", {"editable"}) in shown
    assert not elements.is_cut


@pytest.mark.parametrize("cause", ["limit", "list"])
def test_a_tree_that_lacks_elements_says_so(cause: str) -> None:
    controls = [window("SysListView32")] if cause == "list" else []
    desktop = {"foreground": 0, "windows": [window("Notepad", "a", *controls), window("Notepad", "b")]}
    xml = tree(desktop, limit=1 if cause == "limit" else 100)
    assert parse_tree(xml.decode(), screen_px=(1280, 800)).is_cut


def test_text_that_xml_cannot_hold_is_left_out_of_the_tree() -> None:
    xml = tree({"foreground": 0, "windows": [window("Notepad", "a\x00b\ud800c")]}, limit=9)
    assert parse_tree(xml.decode(), screen_px=(1280, 800)).items[0].name == "abc"
