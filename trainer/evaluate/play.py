"""Make attempts at tasks with the loop, prompts and parser of training, and record each result."""

import asyncio
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from cuaenv.client import Perturb, Task
from trainer.agent.attempts import Environments, play_task
from trainer.agent.loop import AgentEpisode, play_episode
from trainer.agent.ownership import ruling_on
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Conversation, Message, Outcome, Reply, Trajectory
from trainer.evaluate.replay import FILE_NAME, RecordedConversation, directory_name, replay_of
from trainer.evaluate.results import Attempt, ResultsFile
from trainer.evaluate.selection import domain_of, is_infeasible

#: Consecutive errors after which an evaluation stops, or twice its concurrency if that is more.
_MAX_CONSECUTIVE_ERRORS = 8
#: Perturbations of a perturbed attempt.
_PERTURBATION_COUNT = 2
_OUTCOMES: Mapping[Outcome, Literal["terminated", "truncated"]] = {
    Outcome.TERMINATED: "terminated",
    Outcome.TRUNCATED: "truncated",
}


class EvaluationStopped(Exception):
    """Too many consecutive attempts were lost to errors."""


ConversationFactory = Callable[[int], Conversation]
"""Creates a conversation; the argument is the attempt's seed."""


async def play_attempt(
    environments: Environments,
    task: Task,
    new_conversation: ConversationFactory,
    *,
    settings: AgentSettings,
    seed: int = 0,
    pool: str = "",
    replay: Path | None = None,
    show: Callable[[Message | Reply], None] | None = None,
    is_perturbed: bool = False,
) -> Trajectory:
    """Make one attempt; repeat it once on a new machine if its machine is lost. Raises what `play_task` does.

    Args:
        pool: The daemon's pool; empty for the task's own.
        replay: Directory for pictures and turns; None to keep none.
        show: Shows the messages and replies of an attempt that keeps its pictures.
        is_perturbed: Whether the world is perturbed, by the seed.
    """
    recorded: list[RecordedConversation] = []
    opened: list[AgentEpisode] = []

    def conversation() -> Conversation:
        inner = new_conversation(seed)
        if replay is None:
            return inner
        recorded.append(RecordedConversation(inner, replay, show=show))
        return recorded[-1]

    async def play(episode: AgentEpisode, conversation: Conversation) -> Trajectory:
        opened.append(episode)
        return await play_episode(episode, conversation, settings=settings)

    perturb = _perturb(task, seed) if is_perturbed else None
    trajectory = await play_task(
        environments, task.task_id, conversation, settings=settings, pool=pool, perturb=perturb, play=play
    )
    if replay is not None and recorded:
        await _write_replay(recorded[-1], trajectory, opened[-1] if opened else None, settings, replay)
    return trajectory


def _perturb(task: Task, seed: int) -> Perturb:
    # Tasks differ with the same seed, and a repeated attempt has the world of the first.
    return Perturb(seed=zlib.crc32(f"{task.task_id}?{seed}".encode()) >> 1, count=_PERTURBATION_COUNT)


async def evaluate(
    environments: Environments,
    tasks: Sequence[Task],
    new_conversation: ConversationFactory,
    *,
    file: ResultsFile,
    settings: AgentSettings,
    seeds: int,
    concurrency: int,
    pool: str = "",
    replays: bool = True,
    is_perturbed: bool = False,
    report: Callable[[str, int, int], None],
) -> None:
    """Make the attempts that the results file lacks; record each when it ends.

    On cancellation it closes open episodes; recorded attempts are kept.

    Args:
        seeds: Attempts per task, with seeds 0, 1, ...
        pool: The daemon's pool; empty for each task's own.
        is_perturbed: Whether worlds are perturbed, each by its attempt's seed.

    Raises:
        EvaluationStopped: Too many consecutive errors; recorded attempts are kept.
    """
    attempts = [(task, seed) for seed in range(seeds) for task in tasks]
    pending = [(task, seed) for task, seed in attempts if not file.results.is_settled(task.task_id, seed)]
    queue = iter(pending)
    done = len(attempts) - len(pending)
    report("starting" if pending else "all attempts are recorded", done, len(attempts))
    most_errors = max(_MAX_CONSECUTIVE_ERRORS, 2 * concurrency)
    error_count = 0

    async def work() -> None:
        nonlocal done, error_count
        for task, seed in queue:
            name = f"{file.path.stem}.replays/{directory_name(task.task_id, seed)}" if replays else ""
            replay = file.path.parent / name if replays else None
            began_s = time.monotonic()
            trajectory = await play_attempt(
                environments,
                task,
                new_conversation,
                settings=settings,
                seed=seed,
                pool=pool,
                replay=replay,
                is_perturbed=is_perturbed,
            )
            attempt = attempt_of(trajectory, task, seed=seed, seconds=time.monotonic() - began_s, replay=name)
            file.add(attempt)
            done += 1
            report(f"{task.task_id} {attempt.reason}", done, len(attempts))
            # A dead daemon or endpoint must not use up all tasks.
            error_count = error_count + 1 if attempt.is_error else 0
            if error_count >= most_errors:
                raise EvaluationStopped(
                    f"{error_count} consecutive attempts were lost, the last one to {attempt.reason}: {attempt.error}"
                    "; finished attempts are kept: fix the cause and repeat the command"
                )

    try:
        async with asyncio.TaskGroup() as workers:
            for number in range(min(concurrency, len(pending))):
                workers.create_task(work(), name=f"evaluate:{number}")
    except ExceptionGroup as group:
        # All workers fail for the same reason: raise the first error alone.
        raise group.exceptions[0] from None


def attempt_of(trajectory: Trajectory, task: Task, *, seed: int, seconds: float, replay: str = "") -> Attempt:
    """Return the attempt of a trajectory. Only an evaluated one has a score.

    Args:
        replay: Directory of its replay, relative to the results; empty without one.
    """
    evaluation = trajectory.evaluation if trajectory.outcome in _OUTCOMES else None
    return Attempt(
        task_id=task.task_id,
        suite=task.suite,
        level=task.level,
        domain=domain_of(task),
        infeasible=is_infeasible(task),
        seed=seed,
        outcome=_OUTCOMES[trajectory.outcome] if evaluation else "failed",
        reason=trajectory.reason,
        error="" if trajectory.error is None else str(trajectory.error),
        score=None if evaluation is None else evaluation.score,
        owner="" if evaluation else ruling_on(trajectory).owner.value,
        guest_end_cause=trajectory.guest_end_cause,
        basis_digest="" if evaluation is None else evaluation.basis_digest,
        attempt_count=trajectory.attempt_count,
        turn_count=len(trajectory.turns),
        parsed_count=sum(turn.facts.parsed for turn in trajectory.turns),
        seconds=round(seconds, 3),
        episode_id=trajectory.episode_id,
        checks=evaluation.checks if evaluation else (),
        replay=replay,
    )


async def _write_replay(
    recorded: RecordedConversation,
    trajectory: Trajectory,
    episode: AgentEpisode | None,
    settings: AgentSettings,
    directory: Path,
) -> None:
    last = ""
    if episode is not None and not settings.text_only and trajectory.evaluation is not None:
        last = await recorded.save(episode.observation.image)
    replay = replay_of(trajectory, recorded.images, last_image=last)
    await asyncio.to_thread((directory / FILE_NAME).write_text, replay.model_dump_json(), encoding="utf-8")
