"""The asyncio client: opens episodes, renews their leases and closes them."""

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Self, Unpack

from cuaenv.argument_types import checks_arguments
from cuaenv.client.archives import export_to, import_from
from cuaenv.client.credentials import Access, Tls
from cuaenv.client.drawn_placement import OpenRequest
from cuaenv.client.episode import AsyncEpisode, Opening, close_all, finish
from cuaenv.client.errors import NotSupported
from cuaenv.client.forwarding import PortForward, forwarded
from cuaenv.client.host_pool import ClientStatistics, HostPool
from cuaenv.client.limiter import EpisodeLimiter
from cuaenv.client.listings import Listings
from cuaenv.client.placement import RetryPolicy
from cuaenv.client.results import Checkpoint, EpisodeInfo, Evaluation, read_checkpoint, read_evaluation
from cuaenv.client.signatures import takes_options_of
from cuaenv.client.targets import is_ray, parse_targets
from cuaenv.client.view import (
    CheckpointTrigger,
    Perturb,
    ResetOptions,
    Settle,
    StepOptions,
    View,
    wire_perturb,
    wire_settle,
    wire_triggers,
    wire_view,
)
from cuaenv.v1 import env_pb2
from cuaenv.wire import new_id, wire_duration


class AsyncEnvClient(Listings):
    """A client of one daemon or several. Tasks and event loops may share it; each loop has its own connections.

    New episodes are opened on the host with the larger share of free machines, and all their later calls go there.
    """

    @checks_arguments
    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        run: str = "",
        max_episodes: int | None = None,
        retry: RetryPolicy | None = None,
        keep_alive_interval: timedelta | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        expects_idle: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        """Create a client; the first call connects.

        Args:
            targets: `HOST:PORT`, `unix:PATH`, or `dns:///NAME:PORT` for every address of a name; several as a sequence
                or with commas between them. Or `ray://auto`: the hosts of this process's Ray cluster.
            run: Label of the training run, for fair share and metrics.
            max_episodes: Most episodes that resets may hold at once in one event loop; others wait here, not in a
                daemon's queue. None for no limit; forks do not count.
            retry: How lost calls are retried.
            keep_alive_interval: Interval of lease renewals; by default a third of the shortest lease.
            token: Sent with every call; by default the variable `ENVD_TOKEN`. Empty for none.
            tls: Files for an encrypted connection; None for clear text.
            expects_idle: Whether steps say that no call follows soon; for agents whose model thinks after each.
            rng: Draws candidate hosts; by default seeded at random.

        Raises:
            ValueError: A target is malformed; the token is malformed, or would be sent to another host in clear text;
                or `max_episodes` is below 1.
        """
        self.targets = parse_targets(targets)
        """The addresses that it was given."""
        self._access = Access(token=token, tls=tls)
        for target in self.targets:
            if not is_ray(target):  # its hosts are checked when they are known
                self._access.check(target)
        EpisodeLimiter(max_episodes)  # rejects a limit below 1
        self._max_episodes = max_episodes
        self._run = run
        self._retry = retry or RetryPolicy()
        self._keep_alive_interval = keep_alive_interval
        self._expects_idle = expects_idle
        self._rng = rng or random.Random()  # noqa: S311 -- no secret depends on it
        # Each loop touches only its own entry, so threads need no lock.
        self._host_pools: dict[asyncio.AbstractEventLoop, HostPool] = {}

    def _step_options(
        self, settle: Settle | None, view: View | None, coordinate_space: tuple[int, int] | None
    ) -> StepOptions:
        """Return the defaults of the steps of an episode."""
        return StepOptions(settle=settle, view=view, coordinate_space=coordinate_space, expects_idle=self._expects_idle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self.targets)} {list(self._host_pools.values())}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, *, wait: timedelta = timedelta(0)) -> None:
        """Close the running loop's episodes and connections, after ending its cancelled openings at their hosts.

        Idempotent; another call connects again.

        Args:
            wait: First wait this long for open episodes to be closed by their owners.
        """
        loop = asyncio.get_running_loop()
        hosts = self._host_pools.get(loop)
        if hosts is not None:
            await hosts.wait_until_idle(wait)
            self._host_pools.pop(loop, None)
            await finish(hosts.aclose())

    @property
    def episodes(self) -> Sequence[AsyncEpisode]:
        """The episodes that are open in the running loop; `aclose` closes them."""
        hosts = self._host_pools.get(asyncio.get_running_loop())
        return list(hosts.episodes) if hosts else []

    def statistics(self) -> ClientStatistics:
        """Return statistics of the hosts in the running loop."""
        return self._host_pool.statistics()

    @property
    def _host_pool(self) -> HostPool:
        loop = asyncio.get_running_loop()
        hosts = self._host_pools.get(loop)
        if hosts is None:
            # A loop that was closed without `aclose` has cancelled its tasks; drop its channels.
            for closed in [known for known in list(self._host_pools) if known.is_closed()]:
                self._host_pools.pop(closed, None)
            hosts = self._host_pools[loop] = HostPool(
                self.targets,
                access=self._access,
                retry=self._retry,
                keep_alive_interval=self._keep_alive_interval,
                max_episodes=self._max_episodes,
                rng=self._rng,
            )
        return hosts

    @checks_arguments
    def reset_group(
        self,
        task: str | Checkpoint,
        *,
        size: int,
        branches: int = 0,
        pool: str = "",
        max_steps: int = 0,
        lease_ttl: timedelta = timedelta(minutes=5),
        settle: Settle | None = None,
        view: View | None = None,
        coordinate_space: tuple[int, int] | None = None,
        checkpoint_every: int = 0,
        checkpoint_on: Collection[CheckpointTrigger] = (),
        perturb: Perturb | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> Opening[Sequence[AsyncEpisode]]:
        """Open episodes of one task or checkpoint, all or none, and renew their leases until they are closed.

        Await it for the episodes, and close each; or enter it as a block, which closes them on exit. If cancelled
        while opening, the opening is ended at its host, in the background. Resets that follow failed ones pause, up to
        a quarter of a second.

        Args:
            task: Id of the task; or a checkpoint, to begin in that state, on its host.
            size: Number of episodes.
            branches: Most machines that forks of the episodes will take at once; a host with room for them is
                preferred.
            pool: Name of the pool; empty for the task's own.
            max_steps: Steps after which an episode is truncated, those before a checkpoint included; 0 for the limit of
                the task or checkpoint.
            lease_ttl: How long machines outlive this process, 10 s to 1 h.
            settle: When a screen counts as settled, for the first observation and as the steps' default.
            view: Contents of observations, for the first one and as the steps' default; None for `View()`.
            coordinate_space: (width, height) that positions of actions refer to; None for pixels of the screen.
            checkpoint_every: Store a checkpoint after every so many steps; 0 for never.
            checkpoint_on: Further occasions: `branch_point` (a fork), `done` (the agent ended), `failure` (scored 0).
            perturb: Perturbations of the world of all episodes; None for none. Not with a checkpoint.
            timeout: Longest admission and setup.

        Raises:
            EnvError: See the module's tree.
            TypeError: An argument has another type.
            ValueError: An occasion is unknown, or `size` is below 1.
        """
        _require_count("size", size)
        triggers = wire_triggers(checkpoint_on)
        checkpoint = task if isinstance(task, Checkpoint) else None
        task_id = task.task_id if isinstance(task, Checkpoint) else task
        # Shorter than our own deadline, so that the service can still report the reason, also on a busy host.
        ready_timeout = max(timeout - timedelta(seconds=5), timeout / 2)

        def request() -> env_pb2.ResetRequest:
            may_choose = self._host_pool.may_choose
            return env_pb2.ResetRequest(
                request_id=new_id(),
                task_id=task_id,
                checkpoint_id=checkpoint.checkpoint_id if checkpoint else "",
                pool=pool,
                group_size=size,
                lease_ttl=wire_duration(lease_ttl),
                max_steps=max_steps,
                run=self._run,
                settle=wire_settle(settle),
                observation=wire_view(view or View()),
                perturb=wire_perturb(perturb),
                ready_timeout=wire_duration(min(ready_timeout, self._retry.patience) if may_choose else ready_timeout),
                checkpoint_every_steps=checkpoint_every,
                checkpoint_on=triggers,
                share_images=True,
            )

        async def open_group() -> Sequence[AsyncEpisode]:
            episodes = await self._host_pool.reset(
                OpenRequest(
                    make_request=request,
                    size=size,
                    timeout=timeout,
                    lease_ttl=lease_ttl,
                    defaults=self._step_options(settle, view, coordinate_space),
                    task=task_id,
                    pool=pool,
                    branch_count=branches,
                    target=checkpoint.host if checkpoint else "",
                )
            )
            if perturb is not None and not episodes[0].perturbations:
                await close_all(episodes)
                raise NotSupported.by_release("`perturb`", host=episodes[0].host.target)
            return episodes

        return Opening(open_group, lambda episodes: episodes)

    @takes_options_of(reset_group)
    async def open_group(
        self, task: str | Checkpoint, *, size: int, **options: Unpack[ResetOptions]
    ) -> Sequence[AsyncEpisode]:
        """Open episodes of one task or checkpoint, all or none, and renew their leases until the caller closes them."""
        return await self.reset_group(task, size=size, **options)

    @takes_options_of(reset_group, without=["size"])
    @checks_arguments
    def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> Opening[AsyncEpisode]:
        """Open one episode of a task or checkpoint, and renew its lease until it is closed.

        Await it for the episode, and close that; or enter it as a block, which closes the episode on exit.
        """
        return Opening(self.reset_group(task, size=1, **options).open_all, lambda episodes: episodes[0])

    @takes_options_of(reset_group, without=["size"])
    async def open(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AsyncEpisode:
        """Open one episode of a task or checkpoint, and renew its lease until the caller closes it."""
        return await self.reset(task, **options)

    @checks_arguments
    def fork(
        self,
        parent: AsyncEpisode,
        *,
        count: int,
        lease_ttl: timedelta = timedelta(minutes=5),
        view: View | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> Opening[Sequence[AsyncEpisode]]:
        """Branch an active episode: open copies of its current state, all or none, as `reset_group` does.

        The parent continues, and the copies may outlive it. If cancelled while opening, the opening is ended at its
        host, in the background.

        Args:
            parent: The episode; no step of it may be running.
            count: Number of copies.
            lease_ttl: How long their machines outlive this process, 10 s to 1 h.
            view: Contents of their first observations; by default that of the parent's reset.
            timeout: Longest admission and copying.

        Raises:
            NotForkable: It cannot be branched in its current state; it continues.
            EnvError: See the module's tree.
            ValueError: `count` is below 1.
        """
        _require_count("count", count)

        async def open_forks() -> Sequence[AsyncEpisode]:
            request = env_pb2.ForkRequest(
                request_id=new_id(),
                episode_id=parent.episode_id,
                step_index=parent.step_count,
                fork_count=count,
                lease_ttl=wire_duration(lease_ttl),
                observation=wire_view(parent.chosen_view(view), known=parent.observation),
                epoch=parent.epoch,
                share_images=True,
            )
            return await self._host_pool.open(
                OpenRequest(
                    make_request=lambda: request,
                    size=count,
                    timeout=timeout,
                    lease_ttl=lease_ttl,
                    defaults=parent.defaults,
                    host=parent.host,
                    instruction=parent.instruction,
                    seen=parent.observation,
                )
            )

        return Opening(open_forks, lambda episodes: episodes)

    @checks_arguments
    def attach(
        self,
        episode_id: str,
        *,
        lease_ttl: timedelta = timedelta(minutes=5),
        keep_open: bool = False,
        settle: Settle | None = None,
        view: View | None = None,
        coordinate_space: tuple[int, int] | None = None,
        timeout: timedelta = timedelta(minutes=1),
    ) -> Opening[AsyncEpisode]:
        """Take over an open episode of an earlier process with the same token, as `reset` opens a new one.

        Two processes must not act on one episode: a step of the one fails with `Conflict` after one of the
        other. It does not count towards `max_episodes`.

        Args:
            episode_id: Id of the episode, on any of the hosts.
            lease_ttl: How long its machine outlives this process, 10 s to 1 h.
            keep_open: Whether closing it here leaves it open for the process that opened it, which scores it.
            settle: See `reset_group`.
            view: See `reset_group`.
            coordinate_space: See `reset_group`.
            timeout: Longest search and observation.

        Raises:
            EpisodeNotFound: It was closed, its lease expired, or it is another token's.
            EnvError: See the module's tree; the episode stays open.
        """
        defaults = self._step_options(settle, view, coordinate_space)

        async def attach_to() -> Sequence[AsyncEpisode]:
            found = await self._host_pool.attach(
                episode_id, lease_ttl=lease_ttl, keep_open=keep_open, defaults=defaults, timeout=timeout
            )
            return [found]

        return Opening(attach_to, lambda episodes: episodes[0])

    @checks_arguments
    async def evaluate(self, checkpoint: Checkpoint, *, timeout: timedelta = timedelta(minutes=10)) -> Evaluation:
        """Score the state of a checkpoint on a machine of its own; no episode ends, and its own may have ended.

        Raises:
            CheckpointNotFound, CheckpointUnusable: The host has it not, or it is damaged or of another template.
            EvaluatorFailed: There is no score.
            EnvError: See the module's tree.
        """
        request = env_pb2.EvaluateRequest(request_id=new_id(), checkpoint_id=checkpoint.checkpoint_id)
        host = await self._host_pool.host(checkpoint.host, timeout=timeout)
        return read_evaluation(await host.connection.call("Evaluate", request, timeout))

    @checks_arguments
    async def delete_checkpoint(self, checkpoint: Checkpoint, *, timeout: timedelta = timedelta(seconds=30)) -> None:
        """Delete a checkpoint. Episodes that were opened from it continue. Idempotent. Raises: EnvError."""
        request = env_pb2.DeleteCheckpointRequest(checkpoint_id=checkpoint.checkpoint_id)
        host = await self._host_pool.host(checkpoint.host, timeout=timeout)
        await host.connection.call("DeleteCheckpoint", request, timeout)

    @checks_arguments
    async def export_checkpoint(
        self, checkpoint: Checkpoint, path: str | Path, *, timeout: timedelta = timedelta(minutes=10)
    ) -> int:
        """Write a checkpoint to a file, for `import_checkpoint` of another host; returns its size in bytes.

        The file is complete when it has its name, and only its owner can read it. It contains the guest's memory.

        Raises:
            CheckpointNotFound, CheckpointUnusable: There is none, or it is damaged.
            EnvError: See the module's tree.
            OSError: The file cannot be written.
        """
        host = await self._host_pool.host(checkpoint.host, timeout=timeout)
        return await export_to(host.connection, checkpoint.checkpoint_id, Path(path), timeout=timeout)

    @checks_arguments
    async def import_checkpoint(
        self, path: str | Path, *, host: str = "", timeout: timedelta = timedelta(minutes=10)
    ) -> Checkpoint:
        """Store the checkpoint of an exported file on a host; needs a token of scope `admin`, if there are tokens.

        Returns the one that the host has if it was imported before.

        Args:
            path: The file.
            host: The host's address; may be empty if the client has one host.
            timeout: Longest transfer.

        Raises:
            CheckpointUnusable: The file is damaged, or the host has another template or version of the task.
            CheckpointStoreFull: The host has no space for it.
            EnvError: See the module's tree.
            OSError: The file cannot be read.
            ValueError: `host` is empty, and the client has several hosts.
        """
        if not host and len(self.targets) > 1:
            raise ValueError(f"import {path}: this client has {len(self.targets)} hosts; name one with host=...")
        chosen = await self._host_pool.host(host or self.targets[0], timeout=timeout)
        message = await import_from(chosen.connection, Path(path), timeout=timeout)
        return read_checkpoint(message, chosen.target)

    @checks_arguments
    async def close_episode(self, episode: EpisodeInfo, *, timeout: timedelta = timedelta(seconds=30)) -> None:
        """Close a listed episode, which may be another client's, and release its machine. Idempotent.

        Raises:
            EnvError: See the module's tree; the episode may still be open.
        """
        request = env_pb2.CloseRequest(episode_id=episode.episode_id)
        host = await self._host_pool.host(episode.host, timeout=timeout)
        await host.connection.call("Close", request, timeout)

    @asynccontextmanager
    @checks_arguments
    async def forward(
        self, episode: EpisodeInfo, port: int, *, local_port: int = 0, timeout: timedelta = timedelta(seconds=30)
    ) -> AsyncIterator[PortForward]:
        """Forward a local port to a port of a listed episode's guest during the block; see `AsyncEpisode.forward`.

        Raises:
            EnvError: The episode's host cannot be reached within `timeout`.
            ValueError, OSError: See `AsyncEpisode.forward`.
        """
        host = await self._host_pool.host(episode.host, timeout=timeout)
        async with forwarded(host.connection, episode.episode_id, port, local_port=local_port) as forward:
            yield forward


def _require_count(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name}={count}: no episodes; give at least 1")
