"""What the tests on a real Ray cluster share."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.support.proofs import deselect_proof

if TYPE_CHECKING:
    from tests.support.ray_hosts import RayHosts

#: The environment of the other tests has no Ray.
CAN_RUN = find_spec("ray") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect these tests without Ray, with a message."""
    deselect_proof(config, items, marker="ray", can_run=CAN_RUN, message="a Ray cluster. Run: make hosts-proof")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[RayHosts]":
    """Serve three hosts of 8 drawn desktops in a Ray cluster."""
    from tests.support.ray_hosts import RayHosts

    served = RayHosts(tmp_path_factory.mktemp("ray"), capacity=8)
    try:
        for index in range(3):
            served.add(f"host-{index}")
        served.up()
        yield served
    finally:
        served.close()
