"""Configuration that the training plug-ins share: the daemons, the reward and the agent."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field, field_validator

from cuaenv.client import ClientSettings, RetryPolicy, Tls
from trainer.agent.settings import AgentSettings
from trainer.config import STRICT, parse
from trainer.rewards.recipes import Recipe, recipe


class TrainingConfig(BaseModel):
    """The keys under `envd:` that every trainer accepts."""

    model_config = STRICT

    hosts: tuple[str, ...] = Field(min_length=1, strict=False)
    """Daemons: `HOST:PORT` each, or one `dns:///NAME:PORT`. Mandatory."""
    tls: Tls | None = None
    """`ca:`, with `cert:` and `key:` if the daemons require them; None for clear text. The token is in `ENVD_TOKEN`."""
    max_episodes: int = Field(default=0, ge=0)
    """Most concurrent episodes of this process, counting machines that a group keeps for missing members; 0 for no
    limit."""
    run: str = ""
    """Label of the training run at the daemons, for fair share and metrics."""
    pool: str = ""
    """Pool to take machines from; empty for each task's own."""
    task_key: str = "task_id"
    """Key of a data set row that names its task; slime looks in the row's metadata and falls back to its label."""
    attempts: int = Field(default=2, ge=1)
    """Attempts of an episode, each on a new machine, before it is void."""
    engine_timeout_s: float = Field(default=600.0, gt=0)
    """Time for one reply, weight updates included; then the episode is void."""
    reward: dict[str, Any] = Field(default_factory=dict)
    """`recipe:`, a name of `trainer.rewards.recipes.NAMES` (default `task`), and that recipe's options."""
    agent: AgentSettings = Field(default_factory=AgentSettings)
    """Prompt, grammar, view and budgets; the same as for evaluation."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Parse the mapping under `envd:`. Raises: ConfigError."""
        return parse(cls, mapping, path="envd")

    def make_recipe(self) -> Recipe:
        """Return the reward."""
        return _recipe(self.reward)

    @property
    def client(self) -> ClientSettings:
        """How to reach the daemons."""
        return ClientSettings(
            targets=self.hosts,
            run=self.run,
            max_episodes=self.max_episodes or None,
            # A cluster may start the daemons after the trainer.
            retry=RetryPolicy(connect_timeout=self.agent.reset_timeout),
            tls=self.tls,
        )

    @field_validator("hosts", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            _recipe(value)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return value


def _recipe(reward: Mapping[str, Any]) -> Recipe:
    options = {name: value for name, value in reward.items() if name != "recipe"}
    return recipe(str(reward.get("recipe", "task")), **options)
