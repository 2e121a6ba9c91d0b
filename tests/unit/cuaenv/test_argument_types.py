"""Arguments of wrong types are errors that name the argument and the type, at the call that got them."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from cuaenv import actions, client
from cuaenv.argument_types import Checked, checks_arguments
from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    Click,
    ClientSettings,
    Perturb,
    RetryPolicy,
    Settle,
    Tls,
    View,
    Wait,
)

CLIENT = AsyncEnvClient("host:1")
#: The same for calls that type checkers refuse.
UNTYPED: Any = client
CLIENT_UNTYPED: Any = CLIENT


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: UNTYPED.Click(x=1.5, y=2), "Click: x is 1.5, not an integer or None; pass x=2"),
        (lambda: UNTYPED.Click(x="1", y=2), "Click: x is '1', not an integer or None"),
        (lambda: UNTYPED.Click(count=True), "Click: count is True, not an integer"),
        (lambda: UNTYPED.Click(button="centre"), "Click: button is 'centre', not one of left, middle, right"),
        (lambda: UNTYPED.Click(modifiers=[1]), "Click: modifiers is (1,), not a sequence, with a text for each item"),
        (lambda: UNTYPED.PressKeys(5), "PressKeys: keys is 5, not a sequence, with a text for each item"),
        (lambda: UNTYPED.TypeText(5), "TypeText: text is 5, not a text"),
        (lambda: UNTYPED.Wait(1), "Wait: duration is 1, not a timedelta; pass duration=timedelta(seconds=1)"),
        (lambda: UNTYPED.View(encoding="gif"), "View: encoding is 'gif', not one of raw, png, jpeg, webp, none"),
        (lambda: UNTYPED.View(region=(1, 2)), "View: region is (1, 2), not 4 values, an integer each or None"),
        (lambda: UNTYPED.Settle(quiet=0.3), "Settle: quiet is 0.3, not a timedelta; pass quiet=timedelta(seconds=0.3)"),
        (lambda: UNTYPED.Perturb(seed="1"), "Perturb: seed is '1', not an integer"),
        (lambda: UNTYPED.Tls(ca="x.pem"), "Tls: ca is 'x.pem', not a Path; pass ca=Path('x.pem')"),
        (
            lambda: UNTYPED.RetryPolicy(patience=3),
            "RetryPolicy: patience is 3, not a timedelta; pass patience=timedelta(seconds=3)",
        ),
        (
            lambda: UNTYPED.ClientSettings(targets="h:1"),
            "ClientSettings: targets is 'h:1', not a sequence, with a text for each item",
        ),
        (lambda: UNTYPED.EnvClient("h:1", tls="x"), "AsyncEnvClient: tls is 'x', not a Tls or None"),
        (
            lambda: UNTYPED.AsyncEnvClient([5]),
            "AsyncEnvClient: targets is [5], not a text or a sequence, with a text for each item",
        ),
        (lambda: UNTYPED.AsyncEnvClient("h:70000"), "port 70000 of 'h:70000' is outside [1, 65535]; give HOST:PORT"),
        (lambda: CLIENT_UNTYPED.reset(5), "AsyncEnvClient.reset: task is 5, not a text or a Checkpoint"),
        (lambda: CLIENT_UNTYPED.reset("t", view="raw"), "AsyncEnvClient.reset: view is 'raw', not a View or None"),
        (
            lambda: CLIENT_UNTYPED.reset_group("t", size=1, checkpoint_on=["dome"]),
            "AsyncEnvClient.reset_group: checkpoint_on is ['dome'], not a sequence, with one of branch_point",
        ),
        (lambda: CLIENT_UNTYPED.list_tasks(task_ids="a/b"), "AsyncEnvClient.list_tasks: task_ids is 'a/b', not a"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_it(call: Callable[[], object], text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value, ValueError) == ("one of" in text or "outside" in text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Click(x=2**31, y=2), "Click: x is 2147483648; an integer is -2147483648 to 2147483647"),
        (lambda: View(region=(0, 0, 10**30, 1)), f"View: region is (0, 0, {10**30}, 1); an integer is"),
        (
            lambda: CLIENT.reset("t", max_steps=-(10**10)),
            "AsyncEnvClient.reset: max_steps is -10000000000; an integer is",
        ),
        (
            lambda: client.TypeText("a\ud800"),
            "TypeText: text is 'a\\ud800'; a text has no surrogates; remove or replace them",
        ),
        (lambda: client.PressKeys(["a", "\udfff"]), "PressKeys: keys is ('a', '\\udfff'); a text has no surrogates"),
        (lambda: CLIENT.reset("\ud800"), "AsyncEnvClient.reset: task is '\\ud800'; a text has no surrogates"),
    ],
)
def test_a_value_that_no_request_can_hold_is_an_error_that_names_it(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the text is compared below
        call()
    assert str(caught.value).startswith(text)


async def test_a_group_of_no_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="size=0: no episodes; give at least 1"):
        await CLIENT.reset_group("t", size=0).__aenter__()


def test_equivalent_types_are_accepted() -> None:
    assert Click(x=np.int64(3), y=np.int64(4), modifiers=["ctrl"]).modifiers == ("ctrl",)  # type: ignore[arg-type]
    View(region=[1, 2, 3, 4])  # type: ignore[arg-type]
    Tls(ca=Path("x.pem"))
    Wait(timedelta(seconds=1))
    CLIENT.reset("t", coordinate_space=[1000, 1000])  # type: ignore[arg-type]


def test_all_public_records_and_calls_are_checked() -> None:
    records = [*get_args(actions.Action), Settle, View, Perturb, Tls, RetryPolicy, ClientSettings]
    assert [kind for kind in records if not issubclass(kind, Checked)] == []
    unchecked = {
        f"{kind.__name__}.{name}"
        for kind in (AsyncEnvClient, AsyncEpisode)
        for name, method in vars(kind).items()
        if not name.startswith("_") and inspect.isfunction(method) and not _is_checked(method)
    }
    # They take no arguments, or only pass them on to a checked call.
    assert unchecked == {
        "AsyncEnvClient.aclose",
        "AsyncEnvClient.open",
        "AsyncEnvClient.open_group",
        "AsyncEnvClient.statistics",
        "AsyncEpisode.begin_close",
        "AsyncEpisode.chosen_view",
        "AsyncEpisode.close",
        "AsyncEpisode.forward",
        "AsyncEpisode.frames",
        "AsyncEpisode.when_closed",
    }
    assert client.Click is Click


def _is_checked(method: Any) -> bool:
    while method is not None:
        if method.__code__.co_filename == checks_arguments.__code__.co_filename:
            return True
        method = getattr(method, "__wrapped__", None)
    return False
