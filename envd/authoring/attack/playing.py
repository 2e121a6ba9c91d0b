"""Play mutants on forks of the state before their first own step, through the same service as an agent."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

from cuaenv.client import AsyncEnvClient, AsyncEpisode, EnvError, EpisodeEnded, View
from envd.authoring.attack.mutants import Mutant, playable
from envd.authoring.playing import ConditionNotMet, Steps, evidence_of, max_steps_of, play, play_and_evaluate
from envd.authoring.results import Result
from envd.base.config import Config
from envd.daemon.composition import open_daemon
from envd.daemon.ephemeral import ephemeral_config
from envd.tasks.basis import judged_digest
from envd.tasks.model import Task

#: The template may first boot under TCG on a small host, and other tasks may be set up before this one.
_RESET_TIMEOUT = timedelta(minutes=30)
_COMMAND_TIMEOUT = timedelta(minutes=2)
#: The state that a mutant waits for often never comes. One that is late is scored as it is.
_MAX_MUTANT_WAIT_S = 30.0
_MOST_PIXELS = 640 * 400
#: Mutants played at once for each task whose start is open to fork from. A task has 15 to 80 mutants, and few of them
#: remain when the machine of the next task is set up.
_MUTANTS_PER_TRUNK = 4
#: Errors that a mutant causes, and causes again when it is played again: it ended its guest, or made the checker fail.
_REPEATABLE = ("GUEST_ENDED", "EVALUATOR_FAILED")
#: Tools of a task that has an oracle from elsewhere.
GUEST_TOOLS = ("shell", "files")


class Attack(Result):
    """The result of one mutant; see `Mutant.digest`."""

    task_id: str
    mutant: str
    family: str
    script: tuple[str, ...]
    expects_success: bool
    score: float | None = None
    impossible: bool = False
    """Whether one of its commands failed, so that there is nothing to score."""
    reason: str = ""
    """Why there is no score: the reason of the error, such as `EVALUATOR_FAILED` or `GUEST_ENDED`."""
    detail: str = ""
    """The evidence of the checks, or why there is no score."""
    picture: bytes = b""
    """PNG of the final screen; empty unless something was found."""

    @property
    def is_unscored(self) -> bool:
        """Whether something failed that may succeed when it is played again."""
        return self.score is None and not self.impossible and self.reason not in _REPEATABLE

    @property
    def is_killed(self) -> bool:
        """Whether the checker scored it as a sound one does, or it cannot be done."""
        if self.score is None:
            return self.impossible and not self.expects_success
        return self.score == 1 if self.expects_success else self.score < 1


def attack_config(settings: Config, *, parallel_count: int, image: str = "") -> Config:
    """Return settings for an ephemeral daemon that plays `parallel_count` mutants at once; see `ephemeral_config`."""
    # The machines of the tasks themselves, their forks, as many at a task's start for checkers that fail, and one that
    # is being prepared.
    capacity = _trunk_count(parallel_count) + 2 * parallel_count + 1
    own = {"size": 1, "capacity": capacity, "allow_guest_access": True, "tools": GUEST_TOOLS}
    return ephemeral_config(settings, name="attack", pool=own, image=image)


def _trunk_count(parallel_count: int) -> int:
    return max(1, parallel_count // _MUTANTS_PER_TRUNK)


async def attack(
    config: Config,
    tasks: Sequence[Task],
    *,
    parallel_count: int,
    extra: Mapping[str, Sequence[Mutant]],
    is_wanted: Callable[[Mutant, str], bool],
    on_result: Callable[[Attack], None],
) -> None:
    """Play the mutants of all tasks. The next task is set up when all mutants of one before it were forked.

    Machines that cannot be forked while they run are set up for each mutant.

    Args:
        config: See `attack_config`.
        extra: More mutants of tasks, by task id.
        is_wanted: Whether to play this mutant, which has this digest.
    """
    forks, trunks = asyncio.Semaphore(parallel_count), asyncio.Semaphore(_trunk_count(parallel_count))
    async with open_daemon(config) as daemon, AsyncEnvClient(daemon.address, token="") as client:
        capabilities = daemon.hypervisor.capabilities
        runs_guests = capabilities.runs_guests
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                own = judged_digest(task)
                found = [*playable(task, runs_guests=runs_guests), *extra.get(task.task_id, ())]
                found.sort(key=lambda mutant: mutant.shared_count)
                mutants = [each for each in found if is_wanted(each, each.digest(own))]
                player = _MutantPlayer(
                    client=client,
                    task=task,
                    task_digest=own,
                    runs_guests=runs_guests,
                    can_fork=not capabilities.not_forkable,
                    max_steps=max_steps_of(task, limit=config.limits.max_steps),
                    forks=forks,
                    on_result=on_result,
                )
                if mutants:
                    await trunks.acquire()
                    playing = player.play(mutants, on_begun=trunks.release)
                    group.create_task(playing, name=f"attack:{task.task_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MutantPlayer:
    """Plays the mutants of one task. Each that is played holds one of `forks`."""

    client: AsyncEnvClient
    task: Task
    task_digest: str
    runs_guests: bool
    can_fork: bool
    max_steps: int
    forks: asyncio.Semaphore
    on_result: Callable[[Attack], None]

    async def play(self, mutants: Sequence[Mutant], *, on_begun: Callable[[], None]) -> None:
        """Play all mutants. `on_begun` is called when all have begun and the machine they are forked from is closed."""
        left = list(mutants)
        async with AsyncExitStack() as forks, asyncio.TaskGroup() as group:
            try:
                if self.can_fork:
                    async with self._opening() as trunk:
                        await self._fork_all(trunk, left, forks, group)
                for mutant in () if self.can_fork else left:
                    await self.forks.acquire()
                    group.create_task(self._play_apart(mutant), name=f"attack:{mutant.name}")
            except (EnvError, ConditionNotMet) as error:
                for mutant in left:
                    self._on_not_played(mutant, error)
            finally:
                on_begun()

    def _opening(self) -> AbstractAsyncContextManager[AsyncEpisode]:
        view = View(encoding="none")
        return self.client.reset(self.task.task_id, max_steps=self.max_steps, view=view, timeout=_RESET_TIMEOUT)

    async def _play_apart(self, mutant: Mutant) -> None:
        """Play a mutant on a machine of its own, with the steps of the oracle that it shares. Releases a fork."""
        try:
            async with self._opening() as episode:
                await self._perform(episode, self.task.oracle[: mutant.shared_count])
                await self._play(mutant, episode)
        except (EnvError, ConditionNotMet) as error:
            self._on_not_played(mutant, error)
        finally:
            self.forks.release()

    async def _fork_all(
        self, trunk: AsyncEpisode, left: list[Mutant], forks: AsyncExitStack, group: asyncio.TaskGroup
    ) -> None:
        """Play the oracle, and before each of its steps fork the mutants that begin there. Removes them from `left`."""
        for index in range(left[-1].shared_count + 1):
            while left and left[0].shared_count == index:
                count = await self._acquire(sum(mutant.shared_count == index for mutant in left))
                try:
                    episodes = await forks.enter_async_context(self.client.fork(trunk, count=count))
                except BaseException:
                    for _ in range(count):
                        self.forks.release()
                    raise
                for episode in episodes:
                    mutant = left.pop(0)
                    group.create_task(self._play_fork(mutant, episode), name=f"attack:{mutant.name}")
            if left:
                await self._perform(trunk, self.task.oracle[index : index + 1])

    async def _acquire(self, limit: int) -> int:
        """Wait for a free fork; take as many as are free, at most `limit`. Returns how many."""
        await self.forks.acquire()
        count = 1
        while count < limit and not self.forks.locked():
            await self.forks.acquire()
            count += 1
        return count

    async def _play_fork(self, mutant: Mutant, episode: AsyncEpisode) -> None:
        try:
            await self._play(mutant, episode)
            await episode.close()
        finally:
            self.forks.release()

    async def _play(self, mutant: Mutant, episode: AsyncEpisode) -> None:
        result = await self._attack(mutant, episode)
        if not result.is_killed:
            with suppress(EnvError):
                result = result.model_copy(update={"picture": await _picture(episode)})
        self.on_result(result)

    async def _attack(self, mutant: Mutant, episode: AsyncEpisode) -> Attack:
        score, reason, detail, impossible = None, "", "", False
        try:
            for command in mutant.commands:
                done = await episode.run_command(["sh", "-c", command], timeout=_COMMAND_TIMEOUT)
                if impossible := done.exit_code != 0:
                    detail = f"exit code {done.exit_code}: {done.stderr.decode(errors='replace')}"
                    break
            else:
                score, detail = await self._score(mutant, episode)
        except EnvError as error:
            reason = error.reason or error.code
            detail = f"{reason}: {error}"
        return self._result(mutant, score=score, reason=reason, detail=detail, impossible=impossible)

    async def _score(self, mutant: Mutant, episode: AsyncEpisode) -> tuple[float, str]:
        evaluation, problem = await play_and_evaluate(
            episode,
            mutant.steps,
            os=self.task.os,
            runs_guests=self.runs_guests,
            on_step=lambda *_: None,
            max_wait_s=math.inf if mutant.expects_success else _MAX_MUTANT_WAIT_S,
            # The mistake kept a condition of a later step from being met: the state is scored as it is.
            scored_despite=(ConditionNotMet, EpisodeEnded),
        )
        return evaluation.score, "; ".join([*filter(None, [problem]), *evidence_of(evaluation)])

    async def _perform(self, episode: AsyncEpisode, steps: Steps) -> None:
        await play(episode, steps, os=self.task.os, runs_guests=self.runs_guests, on_step=lambda *_: None)

    def _on_not_played(self, mutant: Mutant, error: Exception) -> None:
        self.on_result(self._result(mutant, reason="NOT_PLAYED", detail=f"not played: {error}"))

    def _result(
        self, mutant: Mutant, *, score: float | None = None, reason: str = "", detail: str, impossible: bool = False
    ) -> Attack:
        return Attack(
            task_id=self.task.task_id,
            mutant=mutant.name,
            family=mutant.family.value,
            digest=mutant.digest(self.task_digest),
            script=tuple(mutant.script),
            expects_success=mutant.expects_success,
            score=score,
            impossible=impossible,
            reason=reason,
            detail=detail[:2000],
        )


async def _picture(episode: AsyncEpisode) -> bytes:
    return (await episode.observe(View(encoding="png", max_pixel_count=_MOST_PIXELS))).data
