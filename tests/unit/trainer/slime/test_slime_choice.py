"""slime's data source passes over groups whose tasks are not worth playing now."""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slime import Sample, ScriptedEngine, stand_in_slime
from trainer.data.curriculum import TaskChoice, by_solve_rate
from trainer.slime.hooks import chosen
from trainer.slime.play.samples import task_of


@pytest.fixture(autouse=True)
def _slime() -> Iterator[None]:
    with stand_in_slime(ScriptedEngine(lambda prompt: "")):
        yield


class Source:
    """Like slime's: rows in turn, without end."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.drawn = count()
        self.metadata: dict[str, Any] = {}
        self.status = "PENDING"

    def __len__(self) -> int:
        return len(self.names)

    def get_samples(self, number: int) -> list[list[Any]]:
        groups = []
        for _ in range(number):
            index = next(self.drawn)
            sample = Sample(group_index=index, metadata={"task_id": self.names[index % len(self.names)]})
            sample.status = SimpleNamespace(name=self.status)  # type: ignore[assignment]
            groups.append([sample])
        return groups

    def save(self, rollout_id: int) -> None:
        self.saved = dict(self.metadata)

    def load(self, rollout_id: int | None = None) -> None:
        self.metadata = self.saved


def source_of(*names: str, hopeless: tuple[str, ...] = ()) -> tuple[Source, TaskChoice]:
    source, tasks = Source(*names), TaskChoice(by_solve_rate)
    for name in hopeless:
        for _ in range(8):
            tasks.record(name, solved=False)
    chosen(source, tasks, task_key="task_id")
    return source, tasks


def names_of(groups: list[list[Any]]) -> list[str]:
    return [task_of(group[0], "task_id") for group in groups]


def test_a_hopeless_task_is_passed_over() -> None:
    source, _ = source_of("a", "b", "c", hopeless=("b",))
    assert names_of(source.get_samples(4)) == ["a", "c", "a", "c"]


def test_too_few_tasks_end_in_those_that_were_passed_over() -> None:
    source, _ = source_of("a", "b", "c", hopeless=("a", "b", "c"))
    groups = source.get_samples(2)
    assert names_of(groups) == ["a", "b"]
    assert [group[0].group_index for group in groups] == [0, 1]


def test_an_aborted_group_is_always_continued() -> None:
    source, _ = source_of("a", hopeless=("a",))
    source.status = "ABORTED"
    assert names_of(source.get_samples(2)) == ["a", "a"]
    assert next(source.drawn) == 2


def test_rates_are_saved_and_resumed_with_the_data_source() -> None:
    source, _ = source_of("a", hopeless=("a",))
    source.save(3)
    again, tasks = source_of("a")
    again.saved = source.saved
    again.load(3)
    assert tasks.state() == {"a": [False] * 8}
    # A state of a job without a curriculum has none.
    again.saved = {}
    again.load(4)
    assert tasks.state() == {"a": [False] * 8}
