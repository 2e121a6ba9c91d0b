"""Pass over groups of slime's data source whose tasks are not worth playing now; see `trainer.data.curriculum`."""

from typing import Any, Final

from trainer.data.curriculum import TaskChoice
from trainer.slime.slime_compat import Sample

#: Key in the metadata that slime saves with its data source.
_STATE: Final = "envd_curriculum"


def chosen(source: Any, tasks: TaskChoice, *, task_key: str) -> None:
    """Let a data source return only groups that are played, and save what is known of tasks with its state.

    It draws each row once more at most: if too few tasks are worth playing, it returns those that it passed over first.
    """
    draw, save, load = source.get_samples, source.save, source.load

    def get_samples(count: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = []
        passed_over: list[list[Sample]] = []
        draws_left = count + len(source)
        while len(groups) < count and draws_left:
            draws_left -= 1
            (group,) = draw(1)
            # Of a group that slime aborted, some members may be finished.
            is_new = all(sample.status.name == "PENDING" for sample in group)
            is_played = not is_new or tasks.plays(task_of(group[0], task_key))
            (groups if is_played else passed_over).append(group)
        return groups + passed_over[: count - len(groups)]

    def save_all(rollout_id: int) -> None:
        source.metadata[_STATE] = tasks.state()
        save(rollout_id)

    def load_all(rollout_id: int | None = None) -> None:
        load(rollout_id)
        if state := source.metadata.get(_STATE):
            tasks.resume(state)

    source.get_samples, source.save, source.load = get_samples, save_all, load_all


def task_of(sample: Sample, task_key: str) -> str:
    """Return the task id of a sample's row; empty for a row that cannot be played."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return str(metadata.get(task_key) or sample.label or "")
