"""Verify tasks: the oracle of each task must score 1, and doing nothing must score 0.

Both start from one state, as forks of one machine, and use the same service as an agent. A task that cannot be played
fails, and the others continue.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuaenv.actions import Action, Done
from cuaenv.cli.terminal import progress
from cuaenv.client import AsyncEnvClient, AsyncEpisode, EnvError, StepResult, View
from envd.authoring.playing import ConditionNotMet, Steps, evidence_of, max_steps_of, play_and_evaluate
from envd.base.config import Config
from envd.daemon.composition import open_daemon
from envd.daemon.ephemeral import ephemeral_config
from envd.tasks.model import Task

#: The template may first boot under TCG on a small host, and other tasks may be set up before this one.
_RESET_TIMEOUT = timedelta(minutes=30)


class VerifyingPolicy(Enum):
    """The player of a task."""

    ORACLE = "oracle"
    NULL = "null"

    @property
    def expected_score(self) -> float:
        return 1.0 if self is VerifyingPolicy.ORACLE else 0.0

    def steps(self, task: Task) -> Steps:
        return task.oracle if self is VerifyingPolicy.ORACLE else ((Done(),),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """The result of one policy in one task."""

    task_id: str
    policy: VerifyingPolicy
    score: float | None = None
    detail: str = ""
    """The reason for a missing score, or the evidence of the checks."""

    @property
    def passed(self) -> bool:
        return self.score == self.policy.expected_score


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The results of all tasks."""

    accelerator: str
    results: tuple[PolicyResult, ...]
    skipped: tuple[str, ...] = ()
    not_attacked: tuple[str, ...] = ()
    """Ids of the tasks that changed since `envd tasks attack` passed."""
    left_out: tuple[str, ...] = ()
    """Problems of tasks that could not be loaded, and were not played."""

    def count(self, policy: VerifyingPolicy) -> int:
        return sum(each.passed for each in self.results if each.policy is policy)

    @property
    def failures(self) -> tuple[PolicyResult, ...]:
        return tuple(each for each in self.results if not each.passed)

    @property
    def passed(self) -> bool:
        """Whether all results have the expected score, no task is left out, and none changed since its attack."""
        return not self.failures and not self.not_attacked and not self.left_out

    def as_json(self) -> dict[str, object]:
        return {
            "accelerator": self.accelerator,
            "tasks": len({each.task_id for each in self.results}),
            "oracle_ok": self.count(VerifyingPolicy.ORACLE),
            "null_ok": self.count(VerifyingPolicy.NULL),
            "failures": [
                {
                    "task_id": each.task_id,
                    "policy": each.policy.value,
                    "score": each.score,
                    "expected_score": each.policy.expected_score,
                    "detail": each.detail,
                }
                for each in self.failures
            ],
            "skipped": list(self.skipped),
            "not_attacked": list(self.not_attacked),
            "left_out": list(self.left_out),
        }

    def print(self, console: Console) -> None:
        played = [policy for policy in VerifyingPolicy if any(each.policy is policy for each in self.results)]
        table = Table("task", *(policy.value for policy in played), "problem", box=None, pad_edge=False)
        by_task: dict[str, list[PolicyResult]] = {}
        for each in self.results:
            by_task.setdefault(each.task_id, []).append(each)
        for task_id, results in by_task.items():
            problems = "\n".join(f"{each.policy.value}: {each.detail}" for each in results if not each.passed)
            table.add_row(task_id, *map(_score, results), escape(problems))
        console.print(table)
        for task_id in self.not_attacked:
            console.print(f"{task_id}: changed since it was attacked; run `envd tasks attack {task_id}`", markup=False)
        for problem in self.left_out:
            console.print(f"not played: {problem}", markup=False, soft_wrap=True)
        counts = ", ".join(f"{self.count(policy)} {policy.value}" for policy in played)
        rest = f"; {len(self.skipped)} skipped" if self.skipped else ""
        console.print(
            f"{len(by_task)} {'task' if len(by_task) == 1 else 'tasks'} on {self.accelerator}; passed: {counts}{rest}",
            markup=False,
        )


def verify_config(settings: Config, *, parallel_count: int, image: str = "") -> Config:
    """Return settings for an ephemeral daemon that plays `parallel_count` tasks at once."""
    own = {
        "size": parallel_count,
        # For each task the machines of both policies, and one that is being prepared.
        "capacity": parallel_count * (len(VerifyingPolicy) + 1),
        # The conditions of oracles are checked with commands.
        "allow_guest_access": True,
    }
    return ephemeral_config(settings, name="verify", pool=own, image=image)


async def verify(
    config: Config,
    tasks: Sequence[Task],
    *,
    parallel_count: int,
    policies: Sequence[VerifyingPolicy] = tuple(VerifyingPolicy),
) -> Verification:
    """Play all tasks, at most `parallel_count` at once. Raises: see `open_daemon`."""
    slots = asyncio.Semaphore(parallel_count)
    results: dict[str, tuple[PolicyResult, ...]] = {}

    async def play_task(task: Task) -> None:
        async with slots:
            report(task.task_id, len(results) / len(tasks))
            max_steps = max_steps_of(task, limit=config.limits.max_steps)
            results[task.task_id] = await _play_task(
                client, task, policies, max_steps=max_steps, runs_guests=runs_guests
            )
            report(task.task_id, len(results) / len(tasks))

    # The daemon asks for no token; one from the environment belongs to another daemon.
    async with open_daemon(config) as daemon, AsyncEnvClient(daemon.address, token="") as client:
        accelerator = daemon.hypervisor.accelerator
        runs_guests = daemon.hypervisor.capabilities.runs_guests
        with progress("verify") as report:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(play_task(task), name=f"verify:{task.task_id}")
    in_order = (each for task in tasks for each in results[task.task_id])
    return Verification(accelerator=accelerator.value, results=tuple(in_order))


async def _play_task(
    client: AsyncEnvClient, task: Task, policies: Sequence[VerifyingPolicy], *, max_steps: int, runs_guests: bool
) -> tuple[PolicyResult, ...]:
    """Play the policies in forks of one state."""
    results: list[PolicyResult] = []
    try:
        opening = client.reset_group(
            task.task_id, size=len(policies), max_steps=max_steps, view=View(encoding="none"), timeout=_RESET_TIMEOUT
        )
        async with opening as episodes:
            # The oracle first: if its changes leaked into the other machine, the null policy would score.
            for policy, episode in zip(policies, episodes, strict=True):
                results.append(await _play_policy(task, policy, episode, runs_guests=runs_guests))
    except EnvError as error:
        detail = f"{error.code}: {error}"
        return tuple(PolicyResult(task_id=task.task_id, policy=policy, detail=detail) for policy in policies)
    return tuple(results)


async def _play_policy(
    task: Task, policy: VerifyingPolicy, episode: AsyncEpisode, *, runs_guests: bool
) -> PolicyResult:
    if policy is VerifyingPolicy.ORACLE and not task.oracle:
        return PolicyResult(task_id=task.task_id, policy=policy, detail="the task has no oracle")
    problems: list[str] = []

    def on_step(_actions: tuple[Action, ...], result: StepResult) -> None:
        problems.extend(f"step {result.step_count - 1}: {error}" for error in result.errors)

    try:
        evaluation, _ = await play_and_evaluate(
            episode, policy.steps(task), os=task.os, runs_guests=runs_guests, on_step=on_step
        )
    except ConditionNotMet as error:
        return PolicyResult(task_id=task.task_id, policy=policy, detail=str(error))
    except EnvError as error:
        return PolicyResult(task_id=task.task_id, policy=policy, detail=f"{error.code}: {error}")
    problems += evidence_of(evaluation)
    return PolicyResult(task_id=task.task_id, policy=policy, score=evaluation.score, detail="; ".join(problems))


def _score(result: PolicyResult) -> str:
    shown = "none" if result.score is None else f"{result.score:g}"
    return f"[{'green' if result.passed else 'bold red'}]{shown}[/]"
