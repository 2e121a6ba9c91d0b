"""What a demonstration changed, as checkers, and the task file that is made of it."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from cuaenv.actions import Click, Done, TypeText
from cuaenv.client import AsyncEpisode, CommandResult
from envd.authoring.demonstration import HOME, Proposal, propose, task_text
from envd.tasks.catalogue import TaskCatalogue, TaskFile

INI = f"{HOME}/.config/app.conf"


class Guest:
    """An episode whose guest has these files and windows."""

    def __init__(self, files: Mapping[str, bytes], windows: Sequence[str] = ()) -> None:
        self.files = dict(files)
        self.windows = windows

    async def run_command(self, argv: Sequence[str], *, as_root: bool = False) -> CommandResult:
        if argv[0] == "sh":
            lines = [f"{hashlib.sha256(data).hexdigest()}  {path}" for path, data in self.files.items()]
        else:
            lines = [f"0x0{index} 0 app.App host {title}" for index, title in enumerate(self.windows)]
        return CommandResult(exit_code=0, stdout="".join(f"{line}\n" for line in lines).encode(), stderr=b"")

    async def read_file(self, path: str, *, timeout: timedelta = timedelta(minutes=1)) -> bytes:
        return self.files[path]


async def proposed(before: Guest, after: Guest) -> list[tuple[str, Mapping[str, Any], bool]]:
    found = await propose(cast(AsyncEpisode, before), cast(AsyncEpisode, after))
    return [(each.what, each.checker, each.is_likely) for each in found]


async def test_each_change_becomes_a_checker_and_the_rest_must_stay() -> None:
    before = Guest({"/home/user/a": b"1", "/home/user/gone": b"", INI: b"[Main]\ndark=false\nsize=1\n"}, ["Files"])
    large = b"x" * 20_000
    after = Guest(
        {
            "/home/user/a": b"2",
            "/home/user/new": "ü\n".encode(),
            "/home/user/big": large,
            INI: b"[Main]\ndark=true\nsize=1\n",
        },
        ["Files", "a.txt (1)"],
    )
    found = await proposed(before, after)
    assert [(what, likely) for what, _, likely in found] == [
        (f"{INI}: Main.dark was set to 'true'", True),
        ("/home/user/a was changed", True),
        ("/home/user/big was created", True),
        ("/home/user/gone was deleted", True),
        ("/home/user/new was created", True),
        ("the window 'a.txt (1)' was opened", False),
        ("nothing else was changed", True),
    ]
    checkers = [checker for _, checker, _ in found]
    assert checkers[:6] == [
        {"kind": "ini_value", "path": INI, "section": "Main", "key": "dark", "equals": "true"},
        {"kind": "file_text", "path": "/home/user/a", "equals": "2"},
        {"kind": "file_bytes", "path": "/home/user/big", "sha256": hashlib.sha256(large).hexdigest()},
        {"kind": "file_absent", "path": "/home/user/gone"},
        {"kind": "file_text", "path": "/home/user/new", "equals": "ü\n"},
        {"kind": "window", "window": {"title": r"^a\.txt\ \(1\)$"}},
    ]
    assert set(checkers[6]["except"]) > {INI, "/home/user/a", "/home/user/big", "/home/user/gone", "/home/user/new"}


async def test_a_demonstration_that_changed_nothing_proposes_nothing() -> None:
    guest = Guest({"/home/user/a": b"1"}, ["Files"])
    assert await proposed(guest, guest) == []


@pytest.mark.parametrize("chosen", [[0], [0, 1]])
@pytest.mark.parametrize("end", [(), ((Done("x"),),)])
def test_the_file_names_what_was_not_chosen(
    chosen: list[int], end: tuple[tuple[Done, ...], ...], tmp_path: Path
) -> None:
    proposals = [
        Proposal(what="a was changed", checker={"kind": "file_text", "path": "/home/user/a", "equals": "x: y\n"}),
        Proposal(what="b was deleted", checker={"kind": "file_absent", "path": "/home/user/b"}),
    ]
    text = task_text(
        suite="shop",
        name="add",
        instruction='Write "x: y".',
        setup=[{"kind": "write_file", "path": "/home/user/a", "text": ""}],
        steps=[(Click(3, 4), TypeText("ü 'x'\n")), *end],
        proposals=proposals,
        chosen=chosen,
    )
    path = tmp_path / "shop.yaml"
    path.write_text(text, encoding="utf-8")
    task = TaskCatalogue.load([TaskFile(path)], include_builtin=False).get("shop/add")
    assert task.oracle == ((Click(3, 4), TypeText("ü 'x'\n")), *(end or ((Done(),),)))
    assert ("# also seen: b was deleted" in text) == (chosen == [0])


@pytest.mark.parametrize("line_break", ["\x85", "\u2028", "\u2029", "\r", "\x0b", "\x0c", "\x1c", "\x1e"])
async def test_a_guest_plants_no_task_into_the_comments_of_a_file(line_break: str, tmp_path: Path) -> None:
    planted = (
        f"x{line_break}- name: planted{line_break}  setup: [{{kind: command, argv: [id], as_root: true}}]{line_break}#"
    )
    path = f"/home/user/{planted.replace('/', '-')}"
    before = Guest({INI: b"[Main]\ndark=false\n", "/home/user/a": b"1"})
    after = Guest({INI: f"[Main]\ndark=true\n{planted}=1\n".encode(), "/home/user/a": b"2", path: b"3"}, [planted])
    proposals = await propose(cast(AsyncEpisode, before), cast(AsyncEpisode, after))
    [chosen] = [index for index, each in enumerate(proposals) if each.checker.get("path") == "/home/user/a"]
    text = task_text(
        suite="shop", name="add", instruction="Do it.", setup=[], steps=[(Click(3, 4),)], proposals=proposals,
        chosen=[chosen],
    )  # fmt: skip
    file = tmp_path / "shop.yaml"
    file.write_text(text, encoding="utf-8")
    tasks = TaskCatalogue.load([TaskFile(file)], include_builtin=False).list()
    assert [(task.task_id, task.setup) for task in tasks] == [("shop/add", ())]
    assert all(line.startswith("#") for line in text.partition("# also seen")[2].splitlines()[1:])


@pytest.mark.parametrize("text", ["[a]\nk\n  more\nb=2\n", "[a]\nk\n\tb=2\n", "[a\n", "= 1\n"])
async def test_a_settings_file_that_is_not_read_as_entries_is_compared_as_a_whole(text: str) -> None:
    found = await proposed(Guest({INI: b"[a]\nb=1\n"}), Guest({INI: text.encode()}))
    assert found[0][1] == {"kind": "file_text", "path": INI, "equals": text}
