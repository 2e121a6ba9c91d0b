"""The socket by which processes of other systems' protocols reach their daemon."""

from pathlib import Path

import pytest

from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.daemon.compat import local_socket_of


def test_a_daemon_has_the_socket_only_with_protocols(tmp_path: Path) -> None:
    assert local_socket_of(Config(state_dir=tmp_path)) is None
    assert local_socket_of(Config(state_dir=tmp_path, compat=("areal",))) == tmp_path / "compat.sock"


def test_a_state_directory_whose_path_is_too_long_for_a_socket_is_refused() -> None:
    fits = Path("/" + "s" * 94)
    assert local_socket_of(Config(state_dir=fits, compat=("areal",))) == fits / "compat.sock"
    with pytest.raises(ConfigError, match=r"too long for the socket of compat.* at most 107 bytes; choose a shorter"):
        local_socket_of(Config(state_dir=Path(f"{fits}s"), compat=("areal",)))
