"""Configuration that the training plug-ins share: the daemons, the reward and the agent."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from cuaenv.client import Checkpoint, ClientSettings, RetryPolicy, Tls
from trainer.agent.branch_policy import STANDARD, BranchPolicy, own_policy, standard_policy
from trainer.agent.ownership import reward_of
from trainer.agent.settings import AgentSettings
from trainer.agent.starts import start_of
from trainer.config import STRICT, InputError, parse
from trainer.rewards.facts import Breakdown, EpisodeFacts
from trainer.rewards.recipes import Recipe, recipe_of


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
    """Attempts of an episode, each on a new machine, before it is void; only losses by the host are repeated."""
    engine_timeout_s: float = Field(default=600.0, gt=0)
    """Time for one reply, weight updates included; then the episode is void."""
    ended_by_guest_score: float = Field(default=-0.1, ge=-1, le=0)
    """Replaces the task's score in training if the agent ended its guest without solving the task. Below 0, so that an
    escape is worth less than a failure; evaluations keep the score."""
    reward: str | dict[str, Any] = "task"
    """A name of `trainer.rewards.recipes.NAMES` or an own reward as `module:NAME`; with options, a mapping of the name
    under `recipe:` and the options."""
    agent: AgentSettings = Field(default_factory=AgentSettings)
    """Prompt, grammar, view and budgets; the same as for evaluation."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Parse the mapping under `envd:`. Raises: InputError."""
        return parse(cls, mapping, path="envd")

    @cached_property
    def recipe(self) -> Recipe:
        """The reward."""
        return recipe_of(self.reward)

    def breakdown_of(self, facts: EpisodeFacts, *, evaluation: bool = False) -> Breakdown:
        """Return an episode's reward, with `ended_by_guest_score` in training. Raises: ExtensionError."""
        if evaluation:
            return self.recipe(facts)
        return reward_of(facts, self.recipe, ended_by_guest_score=self.ended_by_guest_score)

    def start_of_row(self, row: Mapping[str, Any], more: Mapping[str, Any]) -> str | Checkpoint:
        """Return where the episodes of a data set row start; `more` has columns that the row may lack.

        Raises:
            InputError: The row has no task id, or a malformed checkpoint.
        """
        task = row.get(self.task_key) or more.get(self.task_key)
        if not isinstance(task, str) or not task:
            found = ", ".join(row) or "no columns"
            raise InputError(
                f"no task id; add {self.task_key} (envd.task_key) to the row or its metadata; it has {found}"
            )
        return start_of({**more, **row}, task)

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
            expects_idle=True,
        )

    @field_validator("hosts", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        recipe_of(value)
        return value


class GroupConfig(TrainingConfig):
    """The keys of trainers whose groups may branch."""

    group: Literal["fork", "tree", "off"] = "fork"
    """`fork`: the members of a group start on forks of one state. `tree`: they branch from each other mid-episode, see
    `trainer.agent.groups`. `off`: each resets alone, from the same template."""
    group_wait_s: float = Field(default=60.0, gt=0)
    """Time for which a group keeps a machine for a member that its trainer has not started yet, and a tree waits for
    machines to branch to."""
    branch: str = STANDARD
    """When members branch (`tree`): `standard`, by `branch_every` and `branch_above`, or an own
    `trainer.agent.branch_policy.BranchPolicy` as `module:FUNCTION`."""
    branch_every: int = Field(default=4, ge=1)
    """Turns between the branch points of a member (`tree`)."""
    branch_ways: int = Field(default=2, ge=2)
    """Members that continue from a branch point, including the one that reached it (`tree`)."""
    branch_above: float | None = Field(default=None, gt=0)
    """Branch, too, before a reply whose tokens have a mean of -log-probability above this, in nats (`tree`). Set
    `branch_every` higher then: it is the longest distance between two branch points."""
    branch_roots: int = Field(default=1, ge=1)
    """Members that start at the beginning of the task (`tree`)."""
    credit: Literal["returns", "siblings"] = "returns"
    """`returns`: a member's reward is compared with its group's. `siblings`: each turn is compared with what other
    members did in the same state, see `trainer.rewards.credit` (`tree`)."""

    @cached_property
    def branch_policy(self) -> BranchPolicy:
        """When members branch. Raises: InputError."""
        if self.branch == STANDARD:
            return standard_policy(every=self.branch_every, above=self.branch_above)
        return own_policy(self.branch)

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        _ = self.branch_policy
        if self.group == "tree" and self.branch == STANDARD and self.branch_every >= self.agent.max_turns:
            raise ValueError(
                f"branch_every is {self.branch_every}, but an episode has at most {self.agent.max_turns} turns"
                " (agent.max_turns) and would never branch; lower it"
            )
        if self.group == "tree" and self.max_episodes:
            raise ValueError(
                f"max_episodes is {self.max_episodes}, which does not count the forks of group: tree; set it to 0 and"
                " limit the trainer's concurrent episodes"
            )
        if self.credit == "siblings" and self.group != "tree":
            raise ValueError("credit: siblings compares members that branched from each other; set group to tree")
        return self
