"""The protocol of the remote server in AReaL's OSWorld example: `/envs`, `/envs/ID/{reset,obs,step,evaluate,close}`.

A session is a client's settings and at most one episode. Creating one never waits: a reset waits for a machine, in the
pool's queue.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from cuaenv.client import AsyncEpisode, State
from envd.integrations.compat.callers import ProtocolSession, TokenHolder, not_found
from envd.integrations.compat.osworld_env import EnvSettings, act, shown
from envd.integrations.compat.routes import Body, Routes, bad_field, json_response, read_body

_shown = partial(shown, screenshot="screenshot_b64")


@dataclass(slots=True, kw_only=True)
class ArealSession(ProtocolSession):
    """A client's settings, and its episode."""

    settings: EnvSettings


def add_areal(routes: Routes[ArealSession]) -> None:
    """Add the protocol's routes."""
    callers = routes.callers
    routes.add_health(
        "/health", lambda: {"status": "ok", "active_sessions": callers.session_count(), "max_envs": callers.capacity}
    )
    routes.add("POST", "/envs", _create)
    routes.add("POST", "/envs/{session_id}/reset", _reset)
    routes.add("GET", "/envs/{session_id}/obs", _observe)
    routes.add("POST", "/envs/{session_id}/step", _step)
    routes.add("POST", "/envs/{session_id}/evaluate", _evaluate)
    routes.add("POST", "/envs/{session_id}/close", _close)


async def _create(request: web.Request, caller: TokenHolder[ArealSession]) -> web.Response:
    settings = await read_body(request, EnvSettings)
    settings.check()
    session_id = uuid.uuid4().hex
    await caller.add(session_id, ArealSession(settings=settings))
    return json_response({"session_id": session_id})


async def _reset(
    request: web.Request, caller: TokenHolder[ArealSession], *, task_config: dict[str, object] | None = None
) -> web.Response:
    session_id = request.match_info["session_id"]
    with caller.using(session_id) as session:
        if task_config is None:
            raise bad_field("task_config", "is required; an episode is one attempt at a task")
        await session.close_episode()
        episode = await session.settings.open(caller, task_config)
        if session_id not in caller.sessions:
            await episode.close()
            raise not_found(session_id)
        # Of two concurrent resets the later one counts.
        await session.close_episode()
        session.episode = episode
        return json_response({"obs": _shown(episode, episode.observation)})


async def _observe(request: web.Request, caller: TokenHolder[ArealSession]) -> web.Response:
    with _episode(request, caller) as episode:
        return json_response({"obs": _shown(episode, await episode.observe(refresh=True))})


async def _step(
    request: web.Request, caller: TokenHolder[ArealSession], *, action: str, pause: float = 0.0
) -> web.Response:
    with _episode(request, caller) as episode:
        observation, error = await act(episode, action, pause_s=pause)
        return json_response(
            {
                "obs": _shown(episode, observation),
                "reward": 0.0,
                "done": episode.state is not State.ACTIVE,
                "info": {"error": error} if error else {},
            }
        )


async def _evaluate(request: web.Request, caller: TokenHolder[ArealSession]) -> web.Response:
    with _episode(request, caller) as episode:
        await read_body(request, Body)
        return json_response({"reward": (await episode.evaluate()).score})


async def _close(request: web.Request, caller: TokenHolder[ArealSession]) -> web.Response:
    await read_body(request, Body)
    await caller.close(request.match_info["session_id"])
    return json_response({"ok": True})


@contextmanager
def _episode(request: web.Request, caller: TokenHolder[ArealSession]) -> Iterator[AsyncEpisode]:
    with caller.using(request.match_info["session_id"]) as session:
        if session.episode is None:
            raise bad_field("session", "has no episode; send its reset first")
        yield session.episode
