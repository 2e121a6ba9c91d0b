"""What all samples of one configuration share in a process, and how a sample goes through it.

`job_of` is the only registry: slime's hooks find the process's job of their configuration through it.
"""

import asyncio
import json
import logging
import weakref
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cuaenv.client import Checkpoint, shared_client
from trainer.agent.groups import Groups
from trainer.agent.ownership import Owner, ruling_of
from trainer.config import ExtensionError, InputError, json_of
from trainer.data.curriculum import TaskChoice, curriculum_of
from trainer.replay.pool import ReplayPool
from trainer.slime import checks, slime_compat
from trainer.slime.config import Halted, SlimeConfig, envd_of
from trainer.slime.monitor import RunMonitor
from trainer.slime.play.engine import SlimeEngine, engine_url
from trainer.slime.play.replay import load_files
from trainer.slime.play.rollout import DaemonWatch, Resources, Rollout
from trainer.slime.play.samples import facts_of, is_void, reset_sample, task_of, void_result
from trainer.slime.play.sight import sight_problem
from trainer.slime.play.workers import WorkerLost, Workers
from trainer.slime.slime_compat import Sample
from trainer.tokens.engine_client import EngineClient
from trainer.tokens.picture_files import PictureFiles

logger = logging.getLogger(__name__)


class Job:
    """The samples of one configuration in this process.

    Thread-safe: the fully asynchronous loop generates in one thread and logs in another. Evaluations may have a loop of
    their own.
    """

    def __init__(self, config: SlimeConfig) -> None:
        """Start nothing yet."""
        self.config = config
        self.monitor = RunMonitor(config)
        """Its finished episodes, and whether it is halted."""
        # By what they examine. Those that are noted are done, or running.
        self._checks: dict[Hashable, Future[None]] = {}
        # An evaluation may have a loop of its own, in another thread.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[DaemonWatch, Groups]] = (
            weakref.WeakKeyDictionary()
        )
        self._workers: dict[str, Workers] = {}

    @cached_property
    def http(self) -> EngineClient:
        """Connections to the engines."""
        return EngineClient()

    @cached_property
    def files(self) -> PictureFiles | None:
        """The files of `envd.picture_dir`; None without it. Raises: OSError."""
        return PictureFiles(self.config.picture_dir) if self.config.picture_dir else None

    @cached_property
    def pool(self) -> ReplayPool | None:
        """The successes of `envd.replay`, at first those of its files; None without it. Raises: OSError."""
        if self.config.replay is None:
            return None
        pool = ReplayPool(self.config.replay)
        load_files(pool)
        return pool

    @cached_property
    def tasks(self) -> TaskChoice:
        """Which tasks of the data set are played. Raises: InputError."""
        return TaskChoice(curriculum_of(self.config.curriculum))

    def resume_pool(self, directory: Path, *, name: str) -> None:
        """Replace the pool by a saved one, if there is one of that name. Raises: OSError, ValueError."""
        if self.config.replay is not None and (directory / f"pool-{name}.json").exists():
            self.pool = ReplayPool.resume(directory, self.config.replay, name=name)
            load_files(self.pool)

    def workers(self, args: Any) -> Workers:
        """Return the processes of `envd.workers`, which use the engine of slime's args."""
        return self._workers.setdefault(engine_url(args), Workers(args, self.config.workers, play_in_worker))

    def here(self) -> Resources:
        """Return what samples share in the running event loop. Raises: OSError: A configured file is unreadable."""
        new = DaemonWatch(self.config.daemon_timeout_s), Groups()
        watch, groups = self._loops.setdefault(asyncio.get_running_loop(), new)
        return Resources(
            config=self.config,
            client=shared_client(self.config.client),
            watch=watch,
            groups=groups,
            http=self.http,
            files=self.files,
            pool=self.pool,
        )

    async def play_sample(
        self,
        args: Any,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        evaluation: bool = False,
        rollout_type: type[Rollout] = Rollout,
    ) -> Any:
        """Check the job and play a sample, in this process or another; return it, or its rows: filled, aborted or void.

        Args:
            args: slime's, as `sample` and `sampling_params`.
            evaluation: Whether the sample only evaluates.
            rollout_type: Type of its rollout.

        Raises:
            InputError: The configuration is invalid, or no row of a data file can be played; no episode was opened.
            Halted: The run cannot go well.
        """

        def void(reason: str, **facts: str) -> Any:
            multiple = self.config.multiple(evaluation=evaluation)
            return void_result(sample, multiple, args, status="FAILED", reason=reason, **facts)

        start: str | Checkpoint = ""
        try:
            await self.ready(args, sample, sampling_params, evaluation=evaluation)
            self.monitor.check(args)
            start, problem = self._start_of(sample)
            if self.monitor.is_halted:
                return void("halted")
            if problem:
                result = void("UnplayableRow", error=problem, owner=Owner.CALLER.value)
            else:
                given: dict[str, Any] = {"start": start, "evaluation": evaluation, "rollout_type": rollout_type}
                if self.config.workers:
                    result = await self.workers(args).play_sample(sample, sampling_params, **given)
                else:
                    result = await self.play_here(args, sample, sampling_params, **given)
        except Halted as error:
            self.monitor.halt(str(error))
            self.monitor.check(args)
            result = void("halted", error=str(error))
        except WorkerLost as error:
            result = void("WorkerLost", error=str(error), owner=Owner.TRAINER.value)
        if not evaluation and sample.status.name != "ABORTED":
            self._record_task(sample)
            self.monitor.record(args, result)
        return result

    def _start_of(self, sample: Sample) -> tuple[str | Checkpoint, str]:
        """Return where a sample starts, and why its row cannot be played; its metadata is a dictionary then."""
        try:
            return checks.start_of_row(sample.metadata, sample.label, self.config), ""
        except InputError as error:
            sample.metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
            return "", str(error)

    def _record_task(self, sample: Sample) -> None:
        """Remember whether a task was solved and that paid. A void sample says nothing of its task."""
        facts = facts_of(sample)
        if "task_score" in facts and not is_void(sample):
            solved = facts["task_score"] >= 1 and facts["is_paid"]
            self.tasks.record(task_of(sample, self.config.task_key), solved=solved)

    async def play_here(
        self,
        args: Any,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        start: str | Checkpoint,
        evaluation: bool,
        rollout_type: type[Rollout],
        is_alone: bool = False,
    ) -> Any:
        """Play a sample in this process; return it, or its rows: filled, aborted or void.

        Args:
            args: slime's, as `sample` and `sampling_params`.
            start: Where the sample starts.
            evaluation: Whether it only evaluates.
            rollout_type: Type of its rollout.
            is_alone: Whether it has machines of its own, not in its group.

        Raises:
            Halted: No daemon answers, or own code that the configuration names failed.
        """
        config = self.config
        # A repeated sample was aborted or failed; its group's machines no longer exist.
        is_alone |= evaluation or sample.status.name != "PENDING" or config.group == "off" or sample.group_index is None
        group_size = 1 if is_alone else int(args.n_samples_per_prompt)
        reset_sample(sample)
        try:
            async with asyncio.timeout(config.limit_s):
                rollout = rollout_type(args, sample, sampling_params, here=self.here(), evaluation=evaluation)
                try:
                    trajectory = await rollout.play_attempts(start, group_size=group_size)
                finally:
                    await rollout.close()
                return await rollout.result_of(trajectory)
        except Halted:
            raise
        except ExtensionError as error:
            raise Halted(str(error)) from error
        except Exception as error:
            logger.exception("[envd] sample %s is void", sample.index)
            owner = ruling_of(error, acted=True).owner.value
            facts = {"reason": type(error).__name__, "error": str(error), "owner": owner}
            return void_result(sample, config.multiple(evaluation=evaluation), args, status="FAILED", **facts)

    async def ready(self, args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, evaluation: bool) -> None:
        """Check arguments, data, hosts and engine, each until the check could be made; other samples wait for it.

        Raises:
            InputError: The arguments cannot work, or no row of a data file can be played.
            Halted: The engine cannot be used.
        """
        config, url = self.config, engine_url(args)
        client = shared_client(config.client)
        given = (args, sample, sampling_params)
        await self._once("arguments", partial(self._check_arguments, args))
        if files := checks.data_files(args):
            await self._once(("rows", files), partial(checks.warn_of_rows, files, config, client))
        if self.monitor.is_halted:
            return
        if config.sight != "off" and not evaluation and not config.agent.text_only:
            await self._once(("sight", url), partial(self._check_sight, *given))
        await self._once("capacity", partial(checks.warn_of_capacity, args, config, client))
        await self._once(("engine", url), partial(self._check_engine, *given))

    async def _check_arguments(self, args: Any) -> bool:
        checks.check(args, self.config)
        return True

    async def _check_sight(self, args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> bool:
        problem = await sight_problem(args, sample, sampling_params, here=self.here())
        if problem and self.config.sight == "refuse":
            self.monitor.halt(f"the policy does not see its pixels: {problem}")
        return True

    async def _check_engine(self, args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> bool:
        chat, config = slime_compat.chat(args), self.config
        if chat.image_id is None:
            return True
        engine = partial(SlimeEngine, args, sample, sampling_params, config=config, client=self.http)
        if self.files is not None:
            in_files, in_requests = engine(files=self.files), engine()
            if not await checks.require_readable(in_files, in_requests, chat, config.picture_dir):
                return False
        return await checks.warn_of_engine(engine(), chat)

    async def _once(self, key: Hashable, examine: Callable[[], Awaitable[bool]]) -> None:
        """Make a check unless it was made, or wait for it. The next sample repeats one that could not be made."""
        mine: Future[None] = Future()
        # A waiting sample that is cancelled does not cancel it.
        mine.set_running_or_notify_cancel()
        found = self._checks.setdefault(key, mine)
        if found is not mine:
            if not found.done():
                await asyncio.wrap_future(found)
            return
        is_made = False
        try:
            is_made = await examine()
        except (InputError, Halted):
            raise
        except Exception:
            logger.exception("[envd] the check of %s could not be made", key)
        finally:
            if not is_made:
                del self._checks[key]
            mine.set_result(None)


_jobs: dict[str, Job] = {}


def job_of(args: Any) -> Job:
    """Return this process's job of the configuration in slime's args. Raises: InputError."""
    text = json_of(envd_of(args))
    if text not in _jobs:
        # Another thread may have made it meanwhile.
        _jobs.setdefault(text, Job(SlimeConfig.from_mapping(json.loads(text))))
    return _jobs[text]


async def play_in_worker(args: Any, sample: Sample, sampling_params: Mapping[str, Any], **given: Any) -> Any:
    """Play a sample in a process of `envd.workers`; see `Job.play_here`. Raises: Halted."""
    return await job_of(args).play_here(args, sample, sampling_params, **given)
