"""What `DesktopWorkflow` takes as `envd`: where the desktops are, how groups are made, agent and reward."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, field_validator

from trainer.agent.settings import AgentSettings
from trainer.rewards.recipes import Recipe, recipe


class ConfigError(ValueError):
    """The configuration cannot be meant; the message names the key. Raised before any episode."""


class ArealConfig(BaseModel):
    """How AReaL's rollout uses our desktops. The keys that slime's configuration has too mean the same there."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    hosts: tuple[str, ...] = Field(min_length=1, strict=False)
    """Where the daemons are: `HOST:PORT` each, or one `dns:///NAME:PORT`."""
    run: str = ""
    """Label of the training run at the daemons, for fair share and metrics."""
    pool: str = ""
    """Pool to take machines from; empty for each task's own."""
    task_key: str = "task_id"
    """Where a dataset row names its task."""
    group_size: int = Field(default=2, ge=1)
    """Episodes of each task that begin on forks of one state. AReaL's own `n_samples` stays 1."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Most episodes at once in this process; more of them wait here and not in a daemon's line."""
    attempts: int = Field(default=2, ge=1)
    """How often an episode is tried on a fresh machine before it is dropped."""
    engine_timeout_s: float = Field(default=600.0, gt=0)
    """For one reply, weight updates included; then the episode is dropped."""
    turn_discount: float = Field(default=0.9, ge=0, le=1)
    """What an earlier turn has of the next one's return; 1 gives each turn all of it, 0 only the last one anything."""
    reward: dict[str, Any] = Field(default_factory=dict)
    """`recipe:` a name of `trainer.rewards.recipes.NAMES`, by default `task`, and that recipe's options."""
    agent: SkipValidation[AgentSettings] = Field(default_factory=AgentSettings)
    """Prompt, grammar, view and budgets; the same as evaluation's."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Return what a YAML mapping says; what is left out has its default. Raises: ConfigError."""
        try:
            config = cls.model_validate(dict(mapping))
            config.make_recipe()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(["envd", *(str(part) for part in first["loc"])])
            raise ConfigError(f"{where}: {first['msg']}; it has {', '.join(cls.model_fields)}") from error
        return config

    def make_recipe(self) -> Recipe:
        """Return the reward. Raises: ConfigError."""
        options = {name: value for name, value in self.reward.items() if name != "recipe"}
        try:
            return recipe(str(self.reward.get("recipe", "task")), **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"envd.reward: {error}") from error

    @field_validator("agent", mode="before")
    @classmethod
    def _read_agent(cls, value: object) -> AgentSettings:
        if not isinstance(value, Mapping):
            raise ValueError("it must be a mapping")  # noqa: TRY004 -- pydantic's way
        return AgentSettings.from_mapping(value)
