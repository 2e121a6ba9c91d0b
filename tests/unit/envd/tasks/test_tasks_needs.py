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


def obstacles(needy: Task, *offers: Offer) -> tuple[str, ...] | None:
    return TaskCatalogue([needy]).with_tasks((), offers=offers).obstacles(needy)


def test_a_task_whose_needs_no_image_provides_has_an_obstacle() -> None:
    found = obstacles(task(needs=["powershell"]), WINE, LINUX)
    assert found == ("needs powershell: image wine of pool wine does not provide it",)


@pytest.mark.parametrize("offers", [(WINE, WINDOWS), (WINDOWS,)])
def test_a_task_whose_needs_an_image_provides_has_no_obstacle(offers: tuple[Offer, ...]) -> None:
    assert obstacles(task(needs=["powershell"]), *offers) is None


def test_a_task_that_names_its_image_or_pool_is_compared_with_that_one() -> None:
    assert obstacles(task(needs=["powershell"], image="wine"), WINE, WINDOWS) is not None
    assert obstacles(task(needs=["powershell"], pool="wine"), WINE, WINDOWS) is not None
    assert obstacles(task(needs=["powershell"], pool="win11"), WINE, WINDOWS) is None


def test_without_a_pool_for_the_task_its_obstacles_are_unknown() -> None:
    assert obstacles(task(needs=["powershell"]), LINUX) is None
    assert obstacles(task(needs=["powershell"])) is None


def test_other_obstacles_are_kept() -> None:
    needy = task(needs=["powershell"])
    catalogue = TaskCatalogue([needy], find_obstacles=lambda _: ("internet: x",), offers=[WINE])
    found = catalogue.obstacles(needy)
    assert found is not None
    assert [each.partition(":")[0] for each in found] == ["internet", "needs powershell"]


def test_tasks_are_split_by_what_an_image_provides() -> None:
    plain, needy = task("plain"), task("needy", needs=["powershell"])
    assert split_by_needs([plain, needy], NOTHING) == ([plain], [needy])
    assert split_by_needs([plain, needy], POWERSHELL) == ([plain, needy], [])


@pytest.mark.parametrize("need", ["", "Power Shell", "-x", "x" * 40])
def test_a_need_is_a_word(need: str) -> None:
    with pytest.raises(ValidationError, match="needs"):
        task(needs=[need])
