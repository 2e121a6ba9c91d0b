"""What tasks need of images, and the obstacle of a task whose needs no image meets."""

import pytest
from pydantic import ValidationError

from envd.hypervisor.machine import GuestOs
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Offer, Task, split_by_needs

NOTHING: frozenset[str] = frozenset()
POWERSHELL = frozenset({"powershell"})
WINE = Offer(pool="wine", os=GuestOs.WINDOWS, image="wine", provides=NOTHING)
WINDOWS = Offer(pool="win11", os=GuestOs.WINDOWS, image="win11", provides=POWERSHELL)
LINUX = Offer(pool="desktop", os=GuestOs.LINUX, image="desktop", provides=POWERSHELL)


def task(name: str = "a", **fields: object) -> Task:
    given = {"task_id": f"s/{name}", "instruction": "i", "level": 1, "infeasible": True, "os": "windows", **fields}
    return Task.model_validate(given)


LACKING = ("needs powershell: image wine of pool wine does not provide it",)


@pytest.mark.parametrize(
    ("fields", "offers", "found"),
    [
        ({}, (WINE, LINUX), LACKING),
        ({}, (WINE, WINDOWS), None),
        ({}, (WINDOWS,), None),
        ({"image": "wine"}, (WINE, WINDOWS), LACKING),
        ({"pool": "wine"}, (WINE, WINDOWS), LACKING),
        ({"pool": "win11"}, (WINE, WINDOWS), None),
        # Without a pool for the task its obstacles are unknown.
        ({}, (LINUX,), None),
        ({}, (), None),
    ],
)
def test_a_task_whose_needs_no_image_provides_has_an_obstacle(
    fields: dict[str, str], offers: tuple[Offer, ...], found: tuple[str, ...] | None
) -> None:
    needy = task("a", needs=["powershell"], **fields)
    assert TaskCatalogue([needy]).with_tasks((), offers=offers).obstacles(needy) == found


def test_other_obstacles_are_kept_and_tasks_split_by_what_an_image_provides() -> None:
    needy = task(needs=["powershell"])
    catalogue = TaskCatalogue([needy], find_obstacles=lambda _: ("internet: x",), offers=[WINE])
    found = catalogue.obstacles(needy)
    assert found is not None
    assert [each.partition(":")[0] for each in found] == ["internet", "needs powershell"]
    plain, needy = task("plain"), task("needy", needs=["powershell"])
    assert split_by_needs([plain, needy], NOTHING) == ([plain], [needy])
    assert split_by_needs([plain, needy], POWERSHELL) == ([plain, needy], [])


@pytest.mark.parametrize("need", ["", "Power Shell", "-x", "x" * 40])
def test_a_need_is_a_word(need: str) -> None:
    with pytest.raises(ValidationError, match="needs"):
        task(needs=[need])
