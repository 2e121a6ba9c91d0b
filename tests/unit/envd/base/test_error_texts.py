"""Complete texts of errors that users act on: the thing, the problem and the remedy. Other tests check classes."""

from collections.abc import Callable

import pytest

from envd.base.errors import ConfigError, EnvdError, RequestIdReused, TaskNotFound, cannot_bind
from tests.support.stub_episodes import TASKS


def raised(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("fail", "kind", "text"),
    [
        (
            lambda: raised(cannot_bind("metrics_listen", "127.0.0.1:9464", "address already in use")),
            ConfigError,
            "metrics_listen 127.0.0.1:9464: cannot be bound: address already in use; stop what listens there, such as"
            " another envd, or set metrics_listen to another",
        ),
        (
            lambda: raised(cannot_bind("listen", "127.0.0.1:80", "permission denied")),
            ConfigError,
            "listen 127.0.0.1:80: cannot be bound: permission denied; set listen to another",
        ),
        (
            lambda: raised(RequestIdReused("r1")),
            RequestIdReused,
            "request_id: r1 was already used with another body; make a new one per request",
        ),
        (
            lambda: TASKS.get("desktop/nota"),
            TaskNotFound,
            "task 'desktop/nota' not found; did you mean desktop/note, desktop/menu?",
        ),
        (
            lambda: TASKS.get("zzz"),
            TaskNotFound,
            "task 'zzz' not found; the suites loaded here are desktop, other; load others by --tasks",
        ),
        (
            lambda: TASKS.select(["drawn/"]),
            TaskNotFound,
            "suite 'drawn' not found; it is played on drawn desktops; use --hypervisor fake",
        ),
    ],
)
def test_an_error_names_thing_problem_and_remedy(fail: Callable[[], object], kind: type[EnvdError], text: str) -> None:
    with pytest.raises(kind) as caught:
        fail()
    assert str(caught.value) == text
