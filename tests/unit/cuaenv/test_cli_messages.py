"""What commands print when a call or a file fails."""

from pathlib import Path

import pytest

from cuaenv.cli.messages import message_of
from cuaenv.client import Draining, EnvError, Unauthenticated, Unavailable


def test_an_unreachable_daemon_or_cluster_is_named_with_what_corrects_it() -> None:
    message = message_of(Unavailable("Connection refused", code="UNAVAILABLE", host="a:1"))
    assert message == "daemon a:1: Connection refused; start it, or correct --envd; a daemon with TLS needs --tls-ca"
    error = Unavailable("ray://auto: no Ray cluster can be reached: none runs", host="ray://auto")
    assert message_of(error) == "ray://auto: no Ray cluster can be reached: none runs"
    message = message_of(Unauthenticated("no token", code="UNAUTHENTICATED"))
    assert message == "no token; commands read the token from the variable ENVD_TOKEN"


@pytest.mark.parametrize("error", [Draining("stops", reason="DRAINING", host="a:1"), EnvError("failed", host="a:1")])
def test_an_error_of_the_service_is_printed_as_it_is(error: EnvError) -> None:
    assert message_of(error) == str(error)


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "x").read_bytes()
    assert message_of(caught.value) == f"{tmp_path / 'x'}: No such file or directory"
