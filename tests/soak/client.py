"""A client that plays random episodes against a daemon, in a process of its own that may be killed (`make soak`).

`python -m tests.soak.client` reads a plan as one line of JSON from standard input and plays until its input ends. Each
line that it writes is one event: the next request, its outcome, the value of the guest's counter. The reader keeps
every request, however this process ends, and another client can continue with the same request ids. All random choices
come from the plan's seed. The reader evaluates the events.

It makes single calls on a `cuaenv.client.connection.Connection` and not `AsyncEnvClient`: it repeats, cancels and
falsifies requests on purpose, which that client prevents.
"""

import asyncio
import json
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import uvloop

from cuaenv.action_codec import to_proto
from cuaenv.actions import Click
from cuaenv.client import EnvError, RetryPolicy, View
from cuaenv.client.connection import DaemonConnection
from cuaenv.client.credentials import Access
from cuaenv.client.targets import Address
from cuaenv.client.view import wire_view
from cuaenv.v1 import env_pb2
from cuaenv.wire import wire_duration
from tests.soak.messages import (
    CANCELLED,
    ENDED,
    GONE,
    MISMATCH,
    NO_CHECKPOINT,
    NO_FILE,
    OK,
    REUSED,
    STALE,
    STORE_FULL,
    TIMED_OUT,
    WRONG_RESPONSE,
    Pending,
    SoakPlan,
    is_voiding,
)

#: After this share of the shortest lease without contact, the lease may have expired by either side's clock.
_EXPIRY_SHARE = 0.7
_MAX_STEPS = 1000
#: Pinned checkpoints give their space back when they expire.
_CHECKPOINT_TTL_S = 20
#: Weights of the ways to make a call, and of what a client does next in an episode.
_BEHAVIOURS = {"plain": 9, "duplicate": 3, "cancel": 3, "short_deadline": 3, "other_body": 1, "late_retry": 1}
_MOVES = {"step": 24, "observe": 4, "fork": 2, "keep_alive": 2, "checkpoint": 5, "rollback": 4}
#: Checkpoints in which a client opens episodes: the newest.
_KNOWN_CHECKPOINTS = 8
#: Outcomes of calls in a store that is full, from which checkpoints are removed for others.
_IN_FULL_STORE = {"checkpoint": (OK, STORE_FULL), "rollback": (OK, NO_CHECKPOINT), "reset": (OK, NO_CHECKPOINT)}
_METHODS = {
    "reset": "Reset",
    "step": "Step",
    "fork": "Fork",
    "checkpoint": "CreateCheckpoint",
    "rollback": "Rollback",
    "observe": "Observe",
    "evaluate": "Evaluate",
    "keep_alive": "KeepAlive",
    "close": "Close",
    "read": "ReadGuestFile",
    "run": "RunGuestCommand",
}
_VIEW = wire_view(View())
_VIEW_WITH_TREE = wire_view(View(a11y_tree=True))


class Outcome(NamedTuple):
    """The outcome of one call."""

    key: str
    response: Any = None


@dataclass(slots=True, eq=False, kw_only=True)
class _Episode:
    """One episode, as its client knows it."""

    episode_id: str
    performed_count: int
    step_count: int = 0
    last_contact_s: float
    is_over: bool = False
    """Void, closed or unknown to the daemon."""
    is_void: bool = False
    """Ended by a fault: it must not get a score, unless it already has one."""
    is_scored: bool = False
    epoch: int = 0
    """0 until a response has it."""
    checkpoints: list[Pending] = field(default_factory=list)
    """Rollbacks to its checkpoints, without a request id."""


class SoakClient:
    """Plays episodes until `stop` is set."""

    def __init__(self, connection: DaemonConnection, plan: SoakPlan) -> None:
        self._connection = connection
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._checkpoints: deque[Pending] = deque(maxlen=_KNOWN_CHECKPOINTS)
        """The newest checkpoints, in the form of `_Episode.checkpoints`."""
        self.stop = asyncio.Event()

    async def play(self) -> None:
        """Continue the episodes of a killed client, then open groups of episodes and play them, until `stop`."""
        plan = self._plan
        async with asyncio.TaskGroup() as tasks:
            for orphan in plan.orphans:
                episode = _Episode(
                    episode_id=orphan.episode_id,
                    performed_count=orphan.performed_count,
                    step_count=orphan.step_count,
                    last_contact_s=orphan.last_contact_s,
                )
                tasks.create_task(self._continue(episode, orphan.pending))
            for reset in plan.resets:
                tasks.create_task(self._play_group(reset))
        while not self.stop.is_set():
            size = 1 if self._random.random() < 0.6 else self._random.randint(1, plan.max_group)
            reset = Pending(call="reset", request_id=self._new_id(), count=size)
            if self._checkpoints and self._random.random() < 0.3:
                stored = self._random.choice(self._checkpoints)
                reset = replace(stored, call="reset", request_id=reset.request_id, count=size)
            await self._play_group(reset)

    async def _play_group(self, reset: Pending) -> None:
        episodes = await self._reset(reset)
        if not episodes:
            await asyncio.sleep(self._random.uniform(0, 0.5))
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                tasks.create_task(self._play_episode(episode))

    async def _continue(self, episode: _Episode, pending: Pending | None) -> None:
        if pending is None:
            await self._play_episode(episode)
            return
        if self._random.random() < 0.5:
            # The step may still be running, and its clicks may be counted or not.
            await self._report_count(episode, settled=False)
        if pending.call == "step" and not episode.is_over:
            await self._finish_step(episode, pending, self._step_request(episode, pending))
        elif pending.call == "fork" and not episode.is_over:
            async with asyncio.TaskGroup() as tasks:
                for child in await self._fork(episode, pending):
                    tasks.create_task(self._play_episode(child))
        elif pending.call == "checkpoint" and not episode.is_over:
            await self._checkpoint(episode, pending)
        elif pending.call == "rollback" and not episode.is_over:
            await self._roll_back(episode, pending)
        await self._play_episode(episode)

    async def _play_episode(self, episode: _Episode) -> None:
        move_count = self._random.randint(2, 14)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(move_count):
                if episode.is_over or self.stop.is_set():
                    break
                (move,) = self._random.choices(list(_MOVES), list(_MOVES.values()))
                if move == "step":
                    await self._step(episode)
                elif move == "observe":
                    await self._observe(episode)
                elif move == "keep_alive":
                    await self._keep_alive(episode)
                elif move == "checkpoint":
                    step_index, epoch = episode.step_count, episode.epoch
                    await self._checkpoint(episode, self._pending("checkpoint", step_index=step_index, epoch=epoch))
                elif move == "rollback":
                    await self._roll_back_somewhere(episode)
                else:
                    count = self._random.randint(1, max(1, self._plan.max_group - 1))
                    pending = Pending(
                        call="fork", request_id=self._new_id(), step_index=episode.step_count, count=count
                    )
                    for child in await self._fork(episode, pending):
                        tasks.create_task(self._play_episode(child))
            await self._finish(episode)

    async def _finish(self, episode: _Episode) -> None:
        if episode.is_void and self._random.random() < 0.5:
            await self._evaluate(episode)
        if not episode.is_over and self._random.random() < 0.3:
            await self._reach_target(episode)
        if not episode.is_over:
            await self._report_count(episode, settled=True)
        if not episode.is_over and self._random.random() < 0.7:
            await self._evaluate(episode)
            if episode.is_scored and not episode.is_over and self._random.random() < 0.3:
                await self._continue_after_score(episode)
            if self._random.random() < 0.2 and episode.is_scored and not episode.is_over:
                await self._refused_step(episode, ENDED)
        if not self.stop.is_set() and self._random.random() < 0.06:
            self._emit("abandoned", episode=episode.episode_id)
            return
        self._emit("closing", episode=episode.episode_id)
        outcome = await self._call("close", env_pb2.CloseRequest(episode_id=episode.episode_id), episode)
        if outcome.key == OK and self._random.random() < 0.2:
            await self._refused_step(episode, GONE)

    async def _continue_after_score(self, episode: _Episode) -> None:
        """Go back to a checkpoint, if there is one, and be scored again."""
        await self._roll_back_somewhere(episode)
        for act in (self._step, partial(self._report_count, settled=True), self._evaluate):
            if not episode.is_scored and not episode.is_over:
                await act(episode)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def _checkpoint(self, episode: _Episode, pending: Pending) -> None:
        request = env_pb2.CreateCheckpointRequest(
            request_id=pending.request_id,
            episode_id=episode.episode_id,
            step_index=pending.step_index,
            epoch=pending.epoch,
            # Some fill the store.
            pinned=pending.request_id < "8",
            ttl=_duration(_CHECKPOINT_TTL_S),
        )
        outcome = await self._make(pending, request, episode)
        if outcome.key == OK:
            stored = Pending(
                call="rollback",
                request_id="",
                step_index=episode.step_count,
                checkpoint_id=outcome.response.checkpoint.checkpoint_id,
                performed_count=episode.performed_count,
            )
            episode.checkpoints.append(stored)
            self._checkpoints.append(stored)
            self._emit("stored", episode=episode.episode_id, checkpoint=stored.checkpoint_id)
        self._emit("ended", id=pending.request_id, episode=episode.episode_id, performed=0)

    async def _roll_back_somewhere(self, episode: _Episode) -> None:
        if episode.checkpoints:
            stored = self._random.choice(episode.checkpoints)
            await self._roll_back(episode, replace(stored, request_id=self._new_id(), epoch=episode.epoch))

    async def _roll_back(self, episode: _Episode, pending: Pending) -> None:
        request = env_pb2.RollbackRequest(
            request_id=pending.request_id,
            episode_id=episode.episode_id,
            checkpoint_id=pending.checkpoint_id,
            epoch=pending.epoch,
            observation=_VIEW,
        )
        outcome = await self._make(pending, request, episode)
        if outcome.key != OK:
            # It is unchanged, unless there is no response.
            episode.is_over = episode.is_over or outcome.key in (TIMED_OUT, CANCELLED)
            self._emit("ended", id=pending.request_id, episode=episode.episode_id, performed=0)
            return
        info, before = outcome.response.episode, episode.epoch
        if info.step_count != pending.step_index or (before and info.epoch != before + 1):
            self._report_wrong("rollback", episode.episode_id, f"requested {pending}, got {info!r}")
        episode.performed_count, episode.step_count = pending.performed_count, pending.step_index
        episode.epoch, episode.is_scored = info.epoch, False
        self._emit("rolled_back", id=pending.request_id, episode=episode.episode_id)
        if before and self._random.random() < 0.3:
            late = replace(self._pending_step(episode, 1), epoch=before)
            await self._call("step", self._step_request(episode, late), episode, allowed=(STALE,))

    # -- calls that open episodes ------------------------------------------------------------------------------------

    async def _reset(self, pending: Pending) -> list[_Episode]:
        request = env_pb2.ResetRequest(
            request_id=pending.request_id,
            task_id="" if pending.checkpoint_id else self._plan.task_id,
            checkpoint_id=pending.checkpoint_id,
            pool=self._plan.pool,
            group_size=pending.count,
            lease_ttl=_duration(self._plan.lease_ttl_s),
            # Branches of branches keep counting, and would soon reach the task's own limit.
            max_steps=_MAX_STEPS,
            observation=_VIEW,
            ready_timeout=_duration(int(self._plan.opening_timeout_s)),
            checkpoint_on=[env_pb2.CHECKPOINT_TRIGGER_FAILURE],
        )
        sent_s = time.monotonic()
        outcome = await self._make(pending, request, None)
        return self._opened(
            outcome,
            pending,
            performed_count=pending.performed_count,
            step_count=pending.step_index,
            parent="",
            sent_s=sent_s,
        )

    async def _fork(self, episode: _Episode, pending: Pending) -> list[_Episode]:
        request = env_pb2.ForkRequest(
            request_id=pending.request_id,
            episode_id=episode.episode_id,
            step_index=pending.step_index,
            fork_count=pending.count,
            lease_ttl=_duration(self._plan.lease_ttl_s),
            observation=_VIEW,
        )
        sent_s = time.monotonic()
        outcome = await self._make(pending, request, episode)
        return self._opened(
            outcome,
            pending,
            performed_count=episode.performed_count,
            step_count=episode.step_count,
            parent=episode.episode_id,
            sent_s=sent_s,
        )

    def _opened(
        self, outcome: Outcome, pending: Pending, *, performed_count: int, step_count: int, parent: str, sent_s: float
    ) -> list[_Episode]:
        count = pending.count
        infos = list(outcome.response.episodes) if outcome.response is not None else []
        self._emit("ended", id=pending.request_id, episode=parent, performed=0)
        if outcome.response is not None and (
            len(infos) != count or any(info.step_count != step_count for info in infos)
        ):
            self._report_wrong(pending.call, parent, f"requested {count} at step {step_count}, got {infos!r}")
        for info in infos:
            episode = info.episode_id
            self._emit(
                "opened",
                episode=episode,
                performed=performed_count,
                step_count=step_count,
                parent=parent,
                checkpoint=pending.checkpoint_id,
            )
        return [
            _Episode(
                episode_id=info.episode_id,
                performed_count=performed_count,
                step_count=step_count,
                # Leases begin before the response, which a repeated call replaces by a later one.
                last_contact_s=sent_s,
                epoch=info.epoch,
            )
            for info in infos
        ]

    async def _make(self, pending: Pending, request: Any, episode: _Episode | None) -> Outcome:
        """Announce a call and make it, with a random behaviour, until it has an outcome."""
        self._emit("sent", episode="" if episode is None else episode.episode_id, pending=asdict(pending))
        (behaviour,) = self._random.choices(list(_BEHAVIOURS), list(_BEHAVIOURS.values()))
        allowed = _IN_FULL_STORE.get(pending.call, (OK,))
        if behaviour == "duplicate":
            calls = (self._call(pending.call, request, episode, allowed=allowed) for _ in range(2))
            one, other = await asyncio.gather(*calls)
            self._compare(pending, one, other, "responses to duplicates differ")
            return max(one, other, key=lambda outcome: outcome.key == OK)
        if behaviour == "cancel":
            await self._cancelled_call(pending.call, request, episode, allowed=allowed)
        elif behaviour == "short_deadline":
            early_s = self._random.uniform(0.001, self._plan.early_s)
            await self._call(pending.call, request, episode, timeout_s=early_s, allowed=(*allowed, TIMED_OUT))
        # A branch waits for machines until its call times out.
        timeout_s = self._plan.opening_timeout_s if pending.call == "fork" else None
        allowed = (OK, TIMED_OUT) if timeout_s else allowed
        outcome = await self._call(pending.call, request, episode, timeout_s=timeout_s, allowed=allowed)
        if outcome.key != OK:
            return outcome
        if behaviour == "late_retry":
            again = await self._call(pending.call, request, episode, renews=False)
            self._compare(pending, outcome, again, "the response to a retry differs")
        elif behaviour == "other_body":
            await self._call(pending.call, _altered(request), episode, allowed=(REUSED,))
        return outcome

    def _compare(self, pending: Pending, first: Outcome, second: Outcome, problem: str) -> None:
        if first.key == second.key == OK and _identity(first) != _identity(second):
            self._report_wrong(pending.call, "", f"{problem}: {_identity(first)} and {_identity(second)}")

    # -- calls on an episode -----------------------------------------------------------------------------------------

    async def _step(self, episode: _Episode) -> None:
        clicks = min(self._plan.max_clicks, self._random.choice((1, 1, 1, 2, 3)))
        if self._random.random() < 0.05:
            shift = self._random.choice((-1, 1, 7))
            if episode.step_count + shift >= 0:
                wrong = replace(self._pending_step(episode, clicks), step_index=episode.step_count + shift)
                await self._call("step", self._step_request(episode, wrong), episode, allowed=(MISMATCH,))
        if not episode.is_over:
            pending = self._pending_step(episode, clicks)
            await self._finish_step(episode, pending, self._step_request(episode, pending))

    async def _reach_target(self, episode: _Episode) -> None:
        while not episode.is_over and (missing := self._plan.target - episode.performed_count) > 0:
            pending = self._pending_step(episode, min(missing, self._plan.max_clicks))
            await self._finish_step(episode, pending, self._step_request(episode, pending))

    async def _finish_step(self, episode: _Episode, pending: Pending, request: Any) -> None:
        outcome = await self._make(pending, request, episode)
        if outcome.key != OK:
            # The number of performed clicks is unknown.
            self._emit("ended", id=pending.request_id, episode=episode.episode_id, performed=None)
            episode.is_over = True
            return
        episode.performed_count += pending.count
        episode.step_count = pending.step_index + 1
        self._emit("ended", id=pending.request_id, episode=episode.episode_id, performed=pending.count)
        response = outcome.response
        results, step_count = response.action_results, response.episode.step_count
        errors = [result.error for result in results if result.error]
        if step_count != episode.step_count or errors or len(results) != pending.count:
            got = f"step {step_count}, results {results!r}"
            self._report_wrong("step", episode.episode_id, f"requested {pending}, got {got}")

    async def _refused_step(self, episode: _Episode, expected: str) -> None:
        pending = self._pending_step(episode, 1)
        await self._call("step", self._step_request(episode, pending), episode, allowed=(expected,))

    async def _observe(self, episode: _Episode) -> None:
        with_tree = self._plan.reads_tree and self._random.random() < 0.5
        request = env_pb2.ObserveRequest(
            episode_id=episode.episode_id,
            observation=_VIEW_WITH_TREE if with_tree else _VIEW,
            refresh=self._random.random() < 0.3,
        )
        await self._call("observe", request, episode, renews=False)

    async def _keep_alive(self, episode: _Episode) -> None:
        request = env_pb2.KeepAliveRequest(episode_ids=[episode.episode_id])
        sent_s = time.monotonic()
        outcome = await self._call("keep_alive", request, episode, renews=False)
        if outcome.key == OK and outcome.response.episodes:
            episode.last_contact_s = sent_s
        elif outcome.key == OK:
            allowed = self._allowed(episode, (OK,))
            text = "missing in the response"
            self._report_status("keep_alive", episode.episode_id, sent_s=sent_s, key=GONE, text=text, allowed=allowed)
            episode.is_over = True

    async def _evaluate(self, episode: _Episode) -> None:
        request = env_pb2.EvaluateRequest(request_id=self._new_id(), episode_id=episode.episode_id)
        self._emit("evaluating", episode=episode.episode_id)
        sent_s = time.monotonic()
        timeout_s = self._plan.evaluate_timeout_s
        count = self._random.choice((1, 1, 2))
        calls = [self._call("evaluate", request, episode, timeout_s=timeout_s) for _ in range(count)]
        scores = {outcome.response.score for outcome in await asyncio.gather(*calls) if outcome.key == OK}
        self._emit("evaluated", episode=episode.episode_id)
        if len(scores) > 1:
            self._report_wrong("evaluate", episode.episode_id, f"responses to duplicates differ: {scores}")
        if scores:
            episode.is_scored = True
            self._emit("scored", episode=episode.episode_id, score=min(scores), sent_s=sent_s)

    async def _report_count(self, episode: _Episode, *, settled: bool) -> None:
        """Read the guest's counter and report it; with `settled`, after the guest had time to count."""
        deadline_s = time.monotonic() + (self._plan.timeout_s / 4 if settled else 0)
        while True:
            count = await self._read_count(episode)
            if count is None:
                return
            if count >= episode.performed_count or time.monotonic() > deadline_s:
                break
            await self._run_guest(episode)
        if settled:
            # A repeated click may arrive late.
            await self._run_guest(episode)
            count = await self._read_count(episode)
        if count is not None:
            self._emit("counted", episode=episode.episode_id, count=count, settled=settled)

    async def _read_count(self, episode: _Episode) -> int | None:
        request = env_pb2.ReadGuestFileRequest(episode_id=episode.episode_id, path=self._plan.counter_path)
        outcome = await self._call("read", request, episode, allowed=(OK, NO_FILE))
        if outcome.key == NO_FILE:
            return 0
        return int(outcome.response.data) if outcome.key == OK else None

    async def _run_guest(self, episode: _Episode) -> None:
        if self._plan.guest_run_s and not episode.is_over:
            argv = ["sleep", f"{self._plan.guest_run_s:g}"]
            request = env_pb2.RunGuestCommandRequest(episode_id=episode.episode_id, argv=argv)
            await self._call("run", request, episode)
        else:
            await asyncio.sleep(0.05)

    # -- one call ----------------------------------------------------------------------------------------------------

    async def _call(
        self,
        call: str,
        request: Any,
        episode: _Episode | None,
        *,
        timeout_s: float | None = None,
        allowed: Iterable[str] = (OK,),
        renews: bool = True,
    ) -> Outcome:
        """Make one call; report its status unless it is `OK` and that is allowed."""
        sent_s = time.monotonic()
        name = "" if episode is None else episode.episode_id
        expected = self._allowed(episode, allowed)
        try:
            response = await self._attempt(call, request, timeout_s)
        except EnvError as error:
            key = _key_of(error)
            expected = self._allowed(episode, expected)
            self._report_status(call, name, sent_s=sent_s, key=key, text=str(error), allowed=expected)
            # Deliberately wrong or short calls do not harm the episode.
            if episode is not None and key.startswith(("DATA_LOSS", "NOT_FOUND/EPISODE")):
                episode.is_over = True
                episode.is_void = episode.is_void or is_voiding(call, key)
            return Outcome(key)
        if OK not in expected:
            self._report_status(call, name, sent_s=sent_s, key=OK, text=str(request), allowed=expected)
        if episode is not None and renews:
            episode.last_contact_s = sent_s  # the lease was renewed at this time at the earliest
        return Outcome(OK, response)

    async def _cancelled_call(
        self, call: str, request: Any, episode: _Episode | None, *, allowed: Sequence[str]
    ) -> None:
        calling = asyncio.create_task(self._attempt(call, request))
        await asyncio.sleep(self._random.uniform(0, self._plan.early_s))
        calling.cancel()
        sent_s = time.monotonic()
        try:
            await calling
        except asyncio.CancelledError:
            return
        except EnvError as error:
            name = "" if episode is None else episode.episode_id
            expected = self._allowed(episode, (*allowed, CANCELLED))
            self._report_status(call, name, sent_s=sent_s, key=_key_of(error), text=str(error), allowed=expected)

    async def _attempt(self, call: str, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self._plan.timeout_s
        return await self._connection.attempt(_METHODS[call], request, timeout_s=timeout_s)

    def _allowed(self, episode: _Episode | None, allowed: Iterable[str]) -> list[str]:
        """Add the outcome that this client's own delay explains: its lease may have expired."""
        expected = list(allowed)
        limit_s = self._plan.lease_ttl_s * _EXPIRY_SHARE
        if episode is not None and time.monotonic() - episode.last_contact_s >= limit_s and GONE not in expected:
            expected.append(GONE)
        return expected

    # -- events ------------------------------------------------------------------------------------------------------

    def _report_status(
        self, call: str, episode: str, *, sent_s: float, key: str, text: str, allowed: Sequence[str] = ()
    ) -> None:
        self._emit("status", call=call, episode=episode, sent_s=sent_s, key=key, text=text[:400], allowed=allowed)

    def _report_wrong(self, call: str, episode: str, text: str) -> None:
        """Report a response that does not match its request."""
        self._report_status(call, episode, sent_s=time.monotonic(), key=WRONG_RESPONSE, text=text)

    def _emit(self, event: str, **fields: Any) -> None:
        # One write, so that a killed process leaves no partial line.
        sys.stdout.write(json.dumps({"event": event, "at_s": time.monotonic(), **fields}) + "\n")
        sys.stdout.flush()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _pending_step(self, episode: _Episode, clicks: int) -> Pending:
        return self._pending("step", step_index=episode.step_count, count=clicks, epoch=episode.epoch)

    def _pending(self, call: str, **fields: Any) -> Pending:
        return Pending(call=call, request_id=self._new_id(), **fields)

    def _step_request(self, episode: _Episode, pending: Pending) -> Any:
        return env_pb2.StepRequest(
            request_id=pending.request_id,
            episode_id=episode.episode_id,
            step_index=pending.step_index,
            epoch=pending.epoch,
            actions=[to_proto(Click(*self._plan.click_px))] * pending.count,
            settle=env_pb2.SettlePolicy(quiet=_duration(self._plan.quiet_s)),
            observation=_VIEW,
        )

    def _new_id(self) -> str:
        return f"{self._random.getrandbits(128):032x}"


def _duration(seconds: float) -> Any:
    return wire_duration(timedelta(seconds=seconds))


def _altered(request: Any) -> Any:
    other = type(request)()
    other.CopyFrom(request)
    if isinstance(other, env_pb2.StepRequest):
        other.actions.append(env_pb2.Action(click=env_pb2.Click()))
    elif isinstance(other, env_pb2.ForkRequest):
        other.fork_count += 1
    elif isinstance(other, env_pb2.CreateCheckpointRequest):
        other.label += "other"
    elif isinstance(other, env_pb2.RollbackRequest):
        other.checkpoint_id += "0"
    else:
        other.max_steps -= 1
    return other


def _identity(outcome: Outcome) -> object:
    """Return the part of a response that every response to the same request must have."""
    response = outcome.response
    if isinstance(response, env_pb2.StepResponse):
        return response.episode.step_count, response.observation.frame.frame_id
    if isinstance(response, env_pb2.CreateCheckpointResponse):
        return response.checkpoint.checkpoint_id
    if isinstance(response, env_pb2.RollbackResponse):
        return response.episode.epoch, response.episode.step_count
    return [episode.episode_id for episode in response.episodes]


def _key_of(error: EnvError) -> str:
    return f"{error.code}/{error.reason}" if error.reason else error.code


async def _main(plan: SoakPlan) -> None:
    loop = asyncio.get_running_loop()
    access = Access(token="", tls=None)
    connection = DaemonConnection(Address(plan.address), access=access, retry=RetryPolicy())
    client = SoakClient(connection, plan)

    def wait_for_end() -> None:
        # The input also ends if the reader has died.
        sys.stdin.readline()
        with suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(client.stop.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        await client.play()
    finally:
        await connection.aclose()


if __name__ == "__main__":
    uvloop.run(_main(SoakPlan.from_json(sys.stdin.readline())))
