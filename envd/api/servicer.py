# ruff: noqa: ARG002, N802 -- names and arguments are those of the contract
"""The service's methods: convert the request, call the episode service, convert the result. Decides nothing.

The episode service owns and shields the work of a call: a client that disconnects cancels only the wait.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from datetime import datetime
from typing import Any, TypeVar

import grpc

from cuaenv.action_codec import to_proto
from cuaenv.capabilities import CAPABILITIES
from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.api.convert_requests import (
    MAX_FILE_BYTES,
    argv_of,
    checkpoint_command,
    checkpoint_id_of,
    command_timeout_s,
    episode_id_of,
    epoch_of,
    file_data_of,
    fingerprint_of,
    fork_command,
    forward_request,
    frames_request,
    guest_path_of,
    int_in_range,
    keep_alive_of,
    observation_options,
    request_id_of,
    required,
    reset_command,
    rollback_command,
    score_command,
    settle_policy,
    step_command,
    task_ids_of,
)
from envd.api.convert_results import (
    checkpoint_message,
    episode_message,
    evaluate_response,
    fork_response,
    frame_message,
    observation_message,
    pool_messages,
    reset_response,
    rollback_response,
    server_message,
    step_response,
    suite_of,
    task_message,
)
from envd.api.flow_control import AckTracker, forwarded, paced
from envd.api.interceptors import ids_of
from envd.api.pages import page_of
from envd.api.security.access import MAX_MESSAGE_BYTES, current_caller
from envd.base.aio import race
from envd.base.errors import EpisodeEnded, GuestError, GuestRefused, InvalidRequest, MachineLost
from envd.base.telemetry import traces
from envd.base.telemetry.logs import bound
from envd.desktop.observation import EncodedFrame, Encoding, ObservationOptions
from envd.episodes.service import EpisodeService
from envd.episodes.types import OpenedGroup
from envd.tasks.model import Task

#: Episodes whose screen size is cached; the oldest are dropped and queried again.
MAX_REMEMBERED_SCREENS = 4096
#: Checkpoints of a list that are converted without a pause: 1 ms.
_LISTED_AT_ONCE = 50

Context = grpc.aio.ServicerContext[Any, Any]
Item = TypeVar("Item")
Opened = TypeVar("Opened", env_pb2.ResetResponse, env_pb2.ForkResponse)


class CUAEnvServicer(env_pb2_grpc.CUAEnvServicer):
    """Serves the contract with an episode service. `env.proto` documents the methods.

    The interceptor admits only requests for the caller's own episodes. The methods set the owner of new episodes, and
    skip other callers' episodes where the contract ignores unknown ones.
    """

    def __init__(self, episodes: EpisodeService) -> None:
        self._episodes = episodes
        self._screens: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._stopping = asyncio.Event()
        self._listing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Held by one listing of tasks or checkpoints of a caller at a time: others would wait for all of them."""

    def end_watches(self) -> None:
        """End the streams that otherwise last until their clients disconnect."""
        self._stopping.set()

    async def Reset(self, request: env_pb2.ResetRequest, context: Context) -> env_pb2.ResetResponse:
        command = reset_command(request, time_remaining_s=_remaining_s(context), caller=current_caller())
        result = await self._episodes.reset(command)
        return await self._opened(result, reset_response(result, share_images=request.share_images))

    async def Step(self, request: env_pb2.StepRequest, context: Context) -> env_pb2.StepResponse:
        return await self._step(request, prefix="")

    async def StreamSteps(
        self, request_iterator: AsyncIterator[env_pb2.StreamStepsRequest], context: Context
    ) -> AsyncIterator[env_pb2.StreamStepsResponse]:
        """Perform steps in order; further requests wait in the transport."""
        episode_id = ""
        async for request in request_iterator:
            step = request.step
            episode_id = episode_id or step.episode_id
            if step.episode_id != episode_id:
                raise InvalidRequest(
                    "step.episode_id",
                    f"{step.episode_id} is not {episode_id}, the stream's episode; open another stream",
                )
            metadata = context.invocation_metadata() or ()
            with traces.call_span("StreamSteps", metadata, ids_of(step)) as trace_ids, bound(**trace_ids):
                response = await self._step(step, prefix="step.")
            yield env_pb2.StreamStepsResponse(request_id=step.request_id, step=response)

    async def Observe(self, request: env_pb2.ObserveRequest, context: Context) -> env_pb2.ObserveResponse:
        episode_id = episode_id_of(request.episode_id)
        options = observation_options(request.observation, "observation")
        settle = settle_policy(request.settle, "settle") if request.HasField("settle") else None
        with _refusals():
            observation = await self._episodes.observe(episode_id, options, refresh=request.refresh, settle=settle)
        self._remember_screen(request.episode_id, observation.frame)
        response = env_pb2.ObserveResponse(observation=observation_message(observation))
        if (episode := self._episodes.find(episode_id)) is not None:
            human = episode.human
            human.observed()
            response.human_actions.extend(map(to_proto, episode.progress.people_actions))
            if human.control_id:
                response.controller = human.holder
        return response

    async def Evaluate(self, request: env_pb2.EvaluateRequest, context: Context) -> env_pb2.EvaluateResponse:
        if request.checkpoint_id:
            command = score_command(request, time_remaining_s=_remaining_s(context), caller=current_caller())
            return evaluate_response(await self._episodes.score(command))
        result = await self._episodes.evaluate(
            episode_id_of(request.episode_id),
            request_id=request_id_of(request.request_id),
            fingerprint=fingerprint_of(request),
            epoch=epoch_of(request),
        )
        return evaluate_response(result)

    async def Fork(self, request: env_pb2.ForkRequest, context: Context) -> env_pb2.ForkResponse:
        command = fork_command(request, time_remaining_s=_remaining_s(context), caller=current_caller())
        result = await self._episodes.fork(command)
        return await self._opened(result, fork_response(result, share_images=request.share_images))

    async def CreateCheckpoint(
        self, request: env_pb2.CreateCheckpointRequest, context: Context
    ) -> env_pb2.CreateCheckpointResponse:
        checkpoint, timings_ms = await self._episodes.checkpoints.create(checkpoint_command(request))
        return env_pb2.CreateCheckpointResponse(checkpoint=checkpoint_message(checkpoint), timings_ms=timings_ms)

    async def Rollback(self, request: env_pb2.RollbackRequest, context: Context) -> env_pb2.RollbackResponse:
        """Put an episode back into the state of a checkpoint."""
        result = await self._episodes.rollback(rollback_command(request))
        self._remember_screen(request.episode_id, result.observation.frame)
        return rollback_response(result)

    async def GetCheckpoint(
        self, request: env_pb2.GetCheckpointRequest, context: Context
    ) -> env_pb2.GetCheckpointResponse:
        checkpoint_id = checkpoint_id_of(request.checkpoint_id)
        found = await self._episodes.checkpoints.get(checkpoint_id, current_caller().may_list)
        return env_pb2.GetCheckpointResponse(checkpoint=checkpoint_message(found))

    async def ListCheckpoints(
        self, request: env_pb2.ListCheckpointsRequest, context: Context
    ) -> env_pb2.ListCheckpointsResponse:
        caller = current_caller()
        async with self._listing[caller.name]:
            found = await self._episodes.checkpoints.list(caller.may_list)
            page, next_token = page_of(
                (
                    checkpoint
                    for checkpoint in found
                    if request.run in ("", checkpoint.spec.run)
                    and request.task_id in ("", checkpoint.spec.task_id)
                    and request.source_episode_id in ("", checkpoint.spec.episode_id)
                ),
                key=lambda checkpoint: _listing_key(checkpoint.create_time, checkpoint.checkpoint_id),
                page_size=request.page_size,
                page_token=request.page_token,
                is_sorted=True,
            )
            response = env_pb2.ListCheckpointsResponse(next_page_token=next_token)
            for at in range(0, len(page), _LISTED_AT_ONCE):
                await asyncio.sleep(0)
                response.checkpoints.extend(map(checkpoint_message, page[at : at + _LISTED_AT_ONCE]))
            return response

    async def DeleteCheckpoint(
        self, request: env_pb2.DeleteCheckpointRequest, context: Context
    ) -> env_pb2.DeleteCheckpointResponse:
        checkpoint_id = checkpoint_id_of(request.checkpoint_id)
        await self._episodes.checkpoints.delete(checkpoint_id, current_caller().may_use)
        return env_pb2.DeleteCheckpointResponse()

    async def ExportCheckpoint(
        self, request: env_pb2.ExportCheckpointRequest, context: Context
    ) -> AsyncIterator[env_pb2.ExportCheckpointResponse]:
        checkpoint_id = checkpoint_id_of(request.checkpoint_id)
        caller = current_caller()
        exported = self._episodes.checkpoints.exported(checkpoint_id, caller.may_use, caller=caller.name)
        async with aclosing(exported) as pieces:
            async for data in pieces:
                yield env_pb2.ExportCheckpointResponse(data=data)

    async def ImportCheckpoint(
        self, request_iterator: AsyncIterator[env_pb2.ImportCheckpointRequest], context: Context
    ) -> env_pb2.ImportCheckpointResponse:
        pieces = (request.data async for request in request_iterator)
        stored = await self._episodes.checkpoints.import_archive(pieces)
        return env_pb2.ImportCheckpointResponse(checkpoint=checkpoint_message(stored))

    async def Close(self, request: env_pb2.CloseRequest, context: Context) -> env_pb2.CloseResponse:
        if request.opening_id:
            if request.episode_id:
                raise InvalidRequest("opening_id", "excludes episode_id; send one of them")
            opening_id = request_id_of(request.opening_id, "opening_id")
            await self._episodes.close_opening(opening_id, owner=current_caller().name)
            return env_pb2.CloseResponse()
        episode_id = episode_id_of(request.episode_id)
        if self._is_callers(episode_id):
            await self._episodes.close(episode_id)
            self._screens.pop(episode_id, None)
        return env_pb2.CloseResponse()

    async def KeepAlive(self, request: env_pb2.KeepAliveRequest, context: Context) -> env_pb2.KeepAliveResponse:
        episode_ids, lease_ttl_s = keep_alive_of(request)
        infos = await self._episodes.keep_alive([i for i in episode_ids if self._is_callers(i)], lease_ttl_s)
        return env_pb2.KeepAliveResponse(episodes=[episode_message(info) for info in infos])

    async def StreamFrames(
        self, request_iterator: AsyncIterator[env_pb2.StreamFramesRequest], context: Context
    ) -> AsyncIterator[env_pb2.StreamFramesResponse]:
        """Stream an episode's screen until it is closed or the daemon stops."""
        requests = aiter(request_iterator)
        episode_id, options, rate_hz = frames_request(await anext(requests, env_pb2.StreamFramesRequest()))
        frames = self._episodes.watch_frames(episode_id, options, max_rate_hz=rate_hz)
        acks = AckTracker()
        failed = asyncio.Event()
        tracking = asyncio.create_task(_track(acks, requests, failed=failed), name=f"frames:{episode_id}")
        try:
            async with aclosing(_until(paced(frames, acks), self._stopping, failed)) as running:
                async for sequence, frame in running:
                    yield env_pb2.StreamFramesResponse(frame=frame_message(frame), sequence=sequence)
            if failed.is_set():
                await tracking
        finally:
            tracking.cancel()
            await asyncio.gather(tracking, return_exceptions=True)

    async def GetServer(self, request: env_pb2.GetServerRequest, context: Context) -> env_pb2.GetServerResponse:
        message = server_message(self._episodes.limits, max_machines=current_caller().max_machines)
        return env_pb2.GetServerResponse(server=message)

    async def ListPools(self, request: env_pb2.ListPoolsRequest, context: Context) -> env_pb2.ListPoolsResponse:
        caller, queues = current_caller(), self._episodes.list_queues() if request.include_queue else {}
        visible = {name: [group for group in queues[name] if caller.may_list(group.owner)] for name in queues}
        pools = pool_messages(self._episodes.list_pools(), visible)
        return env_pb2.ListPoolsResponse(pools=pools, capabilities=sorted(CAPABILITIES))

    async def WatchPools(
        self, request: env_pb2.WatchPoolsRequest, context: Context
    ) -> AsyncIterator[env_pb2.WatchPoolsResponse]:
        """Stream pools until the daemon stops."""
        async with aclosing(_until(self._episodes.watch_pools(), self._stopping)) as running:
            async for pools in running:
                yield env_pb2.WatchPoolsResponse(pools=pool_messages(pools))

    async def GetEpisode(self, request: env_pb2.GetEpisodeRequest, context: Context) -> env_pb2.GetEpisodeResponse:
        info = self._episodes.get_episode(episode_id_of(request.episode_id))
        return env_pb2.GetEpisodeResponse(episode=episode_message(info))

    async def ListEpisodes(
        self, request: env_pb2.ListEpisodesRequest, context: Context
    ) -> env_pb2.ListEpisodesResponse:
        caller = current_caller()
        page, next_token = page_of(
            (info for info in self._episodes.list_episodes() if caller.may_list(info.spec.owner)),
            key=lambda info: _listing_key(info.spec.create_time, info.episode_id),
            page_size=request.page_size,
            page_token=request.page_token,
        )
        return env_pb2.ListEpisodesResponse(
            episodes=[episode_message(info) for info in page], next_page_token=next_token
        )

    async def GetTask(self, request: env_pb2.GetTaskRequest, context: Context) -> env_pb2.GetTaskResponse:
        task_id = required(request.task_id, "task_id")
        async with self._listing[current_caller().name]:
            task = await asyncio.to_thread(self._episodes.tasks.get, task_id)
        (message,) = await self._task_messages([task])
        return env_pb2.GetTaskResponse(task=message)

    async def ListTasks(self, request: env_pb2.ListTasksRequest, context: Context) -> env_pb2.ListTasksResponse:
        task_ids = task_ids_of(request.task_ids)
        tasks = await self._find(task_ids) if task_ids else self._episodes.tasks.list()
        page, next_token = page_of(
            (task for task in tasks if request.suite in ("", suite_of(task))),
            key=lambda task: task.task_id,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        messages = await self._task_messages(page)
        return env_pb2.ListTasksResponse(tasks=messages, next_page_token=next_token)

    async def _task_messages(self, tasks: Sequence[Task]) -> list[env_pb2.Task]:
        catalogue = self._episodes.tasks
        # In a thread: looking for the files of 485 tasks takes 0.07 s.
        async with self._listing[current_caller().name]:
            obstacles = await asyncio.to_thread(lambda: [catalogue.obstacles(task) for task in tasks])
        return [
            task_message(task, variant_count=catalogue.variant_count(task.task_id), obstacles=found)
            for task, found in zip(tasks, obstacles, strict=True)
        ]

    async def _find(self, task_ids: Sequence[str]) -> list[Task]:
        """Return the tasks of `task_ids` that exist. Building a variant takes up to 2.5 ms."""
        find = self._episodes.tasks.find
        async with self._listing[current_caller().name]:
            return await asyncio.to_thread(lambda: [task for task in map(find, task_ids) if task is not None])

    async def ReadGuestFile(
        self, request: env_pb2.ReadGuestFileRequest, context: Context
    ) -> env_pb2.ReadGuestFileResponse:
        episode_id, path = episode_id_of(request.episode_id), guest_path_of(request.path)
        max_bytes = int_in_range(request.max_bytes, "max_bytes", default=MAX_FILE_BYTES, low=1, high=MAX_FILE_BYTES)
        with _refusals():
            data = await self._episodes.read_file(episode_id, path, max_bytes=max_bytes)
        return env_pb2.ReadGuestFileResponse(data=data)

    async def WriteGuestFile(
        self, request: env_pb2.WriteGuestFileRequest, context: Context
    ) -> env_pb2.WriteGuestFileResponse:
        episode_id, path = episode_id_of(request.episode_id), guest_path_of(request.path)
        with _refusals():
            await self._episodes.write_file(episode_id, path, file_data_of(request.data))
        return env_pb2.WriteGuestFileResponse()

    async def RunGuestCommand(
        self, request: env_pb2.RunGuestCommandRequest, context: Context
    ) -> env_pb2.RunGuestCommandResponse:
        episode_id, argv = episode_id_of(request.episode_id), argv_of(request)
        timeout_s, stdin = command_timeout_s(request), file_data_of(request.stdin, "stdin")
        with _refusals():
            result = await self._episodes.run_command(
                episode_id, argv, timeout_s=timeout_s, as_root=request.as_root, stdin=stdin
            )
        return env_pb2.RunGuestCommandResponse(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    async def ForwardGuestPort(
        self, request_iterator: AsyncIterator[env_pb2.ForwardGuestPortRequest], context: Context
    ) -> AsyncIterator[env_pb2.ForwardGuestPortResponse]:
        """Carry bytes between the client and a port of a guest, until both directions or the episode have ended."""
        requests = aiter(request_iterator)
        first = await anext(requests, env_pb2.ForwardGuestPortRequest())
        episode_id, port, idle_timeout_s = forward_request(first)
        with _refusals():
            async with (
                self._episodes.connect_port(episode_id, port, idle_timeout_s=idle_timeout_s) as connection,
                aclosing(forwarded(connection, first, requests)) as responses,
            ):
                async for response in responses:
                    yield response

    async def _opened(self, result: OpenedGroup, response: Opened) -> Opened:
        """Return the response that announces new episodes. Raises: InvalidRequest: too large; they are closed."""
        if response.ByteSize() > MAX_MESSAGE_BYTES:
            # Their caller would not learn their ids, and they would hold their machines until their leases expire.
            await asyncio.gather(*(self._episodes.close(info.episode_id) for info in result.episodes))
            raise InvalidRequest(
                "observation",
                f"the response for {len(result.episodes)} episodes has {response.ByteSize()} bytes, above"
                f" {MAX_MESSAGE_BYTES}, so they were closed; update the client, which then gets a shared image only"
                " once, or request smaller images, less text or a smaller group",
            )
        for info, observation in zip(result.episodes, result.observations, strict=True):
            self._remember_screen(info.episode_id, observation.frame)
        return response

    def _is_callers(self, episode_id: str) -> bool:
        return current_caller().may_use(self._episodes.owner_of(episode_id))

    async def _step(self, request: env_pb2.StepRequest, *, prefix: str) -> env_pb2.StepResponse:
        screen_px = await self._screen_of(request, prefix) if request.HasField("coordinate_space") else None
        result = await self._episodes.step(step_command(request, screen_px=screen_px, prefix=prefix))
        self._remember_screen(request.episode_id, result.observation.frame)
        return step_response(result)

    async def _screen_of(self, request: env_pb2.StepRequest, prefix: str) -> tuple[int, int]:
        # Positions refer to the frame that the caller saw last, not to a size that the guest has changed to since.
        episode_id = episode_id_of(request.episode_id, f"{prefix}episode_id")
        if episode_id not in self._screens:
            options = ObservationOptions(encoding=Encoding.NONE)
            try:
                observation = await self._episodes.observe(episode_id, options, refresh=False, settle=None)
            except (MachineLost, EpisodeEnded):
                # The episode accepts no new step, but this may be a retry with a recorded response.
                return request.coordinate_space.width_px, request.coordinate_space.height_px
            self._remember_screen(episode_id, observation.frame)
        return self._screens[episode_id]

    def _remember_screen(self, episode_id: str, frame: EncodedFrame) -> None:
        self._screens[episode_id] = frame.screen_width_px, frame.screen_height_px
        self._screens.move_to_end(episode_id)
        if len(self._screens) > MAX_REMEMBERED_SCREENS:
            self._screens.popitem(last=False)


def _listing_key(create_time: datetime, object_id: str) -> str:
    """Return a unique key that sorts episodes or checkpoints from the oldest to the newest."""
    return f"{create_time.isoformat(timespec='microseconds')}/{object_id}"


def _remaining_s(context: Context) -> float | None:
    # The type stubs declare float, but it is None if the client set no deadline.
    remaining_s: float | None = context.time_remaining()
    return remaining_s


@contextmanager
def _refusals() -> Iterator[None]:
    """Report a guest error as `GuestRefused`: the episode continues. In a step or reset the same error voids it."""
    try:
        yield
    except GuestError as error:
        raise GuestRefused(str(error)) from error


async def _track(
    acks: AckTracker, requests: AsyncIterator[env_pb2.StreamFramesRequest], *, failed: asyncio.Event
) -> None:
    """Process acknowledgements; on a failure, such as a revoked token, set `failed` and raise it."""
    try:
        await acks.track(message.acknowledged_sequence async for message in requests)
    except Exception:
        failed.set()
        raise


async def _until(items: AsyncGenerator[Item, None], *stops: asyncio.Event) -> AsyncGenerator[Item, None]:
    """Yield all items, or until one of `stops` is set; then close the generator."""
    upcoming: asyncio.Future[Item] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(anext(items))
            await race(upcoming, *stops)
            if not upcoming.done():
                return
            try:
                item = upcoming.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if upcoming is not None and upcoming.cancel():
            await asyncio.gather(upcoming, return_exceptions=True)
        await items.aclose()
