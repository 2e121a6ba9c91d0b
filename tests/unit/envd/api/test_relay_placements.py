"""The file that remembers which shard got a reset."""

from pathlib import Path

import pytest

from envd.api.relay import placements
from envd.api.relay.placements import Placements
from envd.base.errors import StoreError


def test_placements_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "placements"
    first = Placements(path)
    first.place("/r1", 1)
    first.place("/r2", 0)
    first.forget("/r2")
    # Not closed, and the last line is cut as by a power failure.
    with path.open("a") as file:
        file.write("/r3")
    again = Placements(path)
    assert [again.shard_of(each) for each in ("/r1", "/r2", "/r3")] == [1, None, None]
    first.close()
    again.close()


def test_a_malformed_request_id_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "placements"
    kept = Placements(path)
    kept.place("/r1 0\n/r2", 1)
    kept.place("/", 1)
    assert path.read_text() == ""
    kept.close()


def test_the_oldest_placements_are_dropped_and_the_file_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placements, "KEPT_COUNT", 3)
    monkeypatch.setattr(placements, "_MAX_LINES", 5)
    path = tmp_path / "placements"
    kept = Placements(path)
    for number in range(20):
        kept.place(f"me/r{number}", number % 2)
        assert len(path.read_text().splitlines()) <= 5
    assert kept.shard_of("me/r16") is None
    assert [kept.shard_of(f"me/r{number}") for number in (17, 18, 19)] == [1, 0, 1]
    kept.close()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="placements: No such file or directory; free its disk"):
        Placements(tmp_path / "missing" / "placements")
