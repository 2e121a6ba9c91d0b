"""The mapping `envd` that `DesktopWorkflow` takes."""

from pydantic import Field

from trainer.agent.training import TrainingConfig


class ArealConfig(TrainingConfig):
    """How AReaL's rollout uses our desktops."""

    group_size: int = Field(default=2, ge=1)
    """Episodes per task, on forks of one state. AReaL's own `n_samples` stays 1."""
    turn_discount: float = Field(default=0.9, ge=0, le=1)
    """A turn's return as a share of the next turn's: 1 gives each turn the full reward, 0 only the last one."""
