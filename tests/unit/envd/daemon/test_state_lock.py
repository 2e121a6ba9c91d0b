"""One daemon per state directory."""

import fcntl
import os
from pathlib import Path

import pytest

from envd.base.errors import ConfigError
from envd.daemon.state_lock import holder, locked


def test_a_second_daemon_on_the_same_directory_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    state_dir = tmp_path / "deep" / "state"
    with (
        locked(state_dir),
        pytest.raises(ConfigError, match=f"is in use by envd, process {os.getpid()}; stop it, or choose another"),
        locked(state_dir),
    ):
        pass


def test_the_directory_is_released_even_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="crash"), locked(tmp_path):
        raise RuntimeError("crash")
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()
    assert holder(tmp_path) is None


def test_an_unused_directory_has_no_holder(tmp_path: Path) -> None:
    assert holder(tmp_path / "none") is None


def test_a_lookup_of_the_holder_does_not_refuse_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path):
        pass
    lookup = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(lookup, fcntl.LOCK_SH)  # as in the middle of `holder`
    monkeypatch.setattr("time.sleep", lambda _: os.close(lookup))
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()


def test_a_directory_that_cannot_be_created_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state-dir"), locked(tmp_path / "file" / "state"):
        pass
