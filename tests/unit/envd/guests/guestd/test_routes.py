"""Routes without an X server: the wallpaper, and the matching of windows."""

import json
from pathlib import Path

import pytest

from envd.guests.guestd.guest import Guest
from envd.guests.guestd.messages import Request
from envd.guests.guestd.routes import respond
from envd.guests.guestd.x11 import Window


@pytest.mark.parametrize(
    ("name", "strict", "by_class", "found"),
    [
        ("notes", False, False, True),
        ("notes.txt - Editor", True, False, True),
        ("notes", True, False, False),
        ("editor", False, True, True),
        ("ed.Editor", True, True, True),
        ("firefox", False, False, False),
    ],
)
def test_windows_match_by_title_in_part_or_whole_or_by_class(
    name: str, strict: bool, by_class: bool, found: bool
) -> None:
    window = Window(1, "notes.txt - Editor", "ed.Editor", 0, 0, 1, 1, active=True)
    assert window.matches(name, strict=strict, by_class=by_class) is found


def test_a_wallpaper_program_that_never_returns_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "picture.png"
    picture.touch()
    for name, script in (("feh", "exec /bin/sleep 60"), ("hsetroot", f"echo $2 > {tmp_path}/shown")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    guest = Guest()
    guest.wallpaper_timeout_s = 0.3
    body = json.dumps({"path": str(picture)}).encode()
    response = respond(guest, "POST", Request("/setup/change_wallpaper", {}, "application/json", body))
    assert response.status == 200
    assert (tmp_path / "shown").read_text().strip() == str(picture)
