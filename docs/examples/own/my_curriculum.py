"""curriculum: "my_curriculum:not_yet_easy", with --data-source-path trainer.slime.hooks.data_source."""

from trainer.data.curriculum import TaskHistory


def not_yet_easy(history: TaskHistory) -> bool:
    """Play what fewer than nine of ten episodes solved; look at the rest each twentieth time."""
    rate = history.solve_rate
    return rate is None or rate < 0.9 or history.passed_over >= 19
