"""Playing oracles in episodes."""

from envd.bench.playing import max_steps_of
from envd.tasks.catalogue import TaskCatalogue


def test_an_oracle_has_steps_to_wait_for_a_busy_guest_within_the_limit_of_the_daemon() -> None:
    task = TaskCatalogue.load().get("desktop/calculate-and-note")
    assert max_steps_of(task, limit=1000) > task.max_steps
    assert max_steps_of(task, limit=40) == 40
