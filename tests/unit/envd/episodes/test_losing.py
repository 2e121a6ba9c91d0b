"""Who caused the failure of a call on an episode."""

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envd.base.errors import DisplayError, EnvdError, HypervisorError, MachineLost
from envd.base.losses import Loss, LossOwner
from envd.episodes.registry import find_loss

_SILENT = "the guest does not answer although the host lets it run"


@asynccontextmanager
async def _running() -> Any:
    yield


def _episode(found: Loss) -> Any:
    async def examine() -> Loss:
        return found

    machine = SimpleNamespace(loss=None, lost=SimpleNamespace(is_set=lambda: False), examine=examine)
    leased = SimpleNamespace(machine=machine, desktop=SimpleNamespace(is_asleep=False), running=_running)
    return cast("Any", SimpleNamespace(machine=leased))


@pytest.mark.parametrize(
    ("error", "explains_display", "owner"),
    [
        (DisplayError("the display closed its connection"), False, LossOwner.UNDECIDED),
        (DisplayError("the display closed its connection"), True, LossOwner.GUEST),
        (MachineLost("its display cannot be reached"), True, LossOwner.GUEST),
        (HypervisorError("it could not be paused"), True, LossOwner.UNDECIDED),
    ],
)
async def test_a_display_that_fails_is_the_guests_where_the_guest_serves_it(
    error: EnvdError, *, explains_display: bool, owner: LossOwner
) -> None:
    # Otherwise an agent could choose that its episode is undecided: a fork bomb ends a container's X server.
    silent = Loss(LossOwner.GUEST, _SILENT, "UNRESPONSIVE", explains_display=explains_display)
    found = await find_loss(_episode(silent), error)
    assert found is not None
    assert found.owner is owner
