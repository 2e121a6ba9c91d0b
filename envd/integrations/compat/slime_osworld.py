"""The protocol of Slime-OSWorld's environment server: `/reset`, `/step`, `/render`, `/evaluate`, `/close`, `/health`.

Differences from that server, all in the client's favour: a full pool queues a reset instead of closing the oldest
episode, a failed evaluation is an error instead of `{"reward": 0.0}`, and `/render` returns the present screen.
"""

from functools import partial

from aiohttp import web

from cuaenv.client import State
from envd.integrations.compat.callers import ProtocolSession, TokenHolder
from envd.integrations.compat.osworld_env import EnvSettings, act, shown
from envd.integrations.compat.routes import Routes, json_response

_shown = partial(shown, screenshot="screenshot_base64")
_DEFAULTS = EnvSettings()


def add_slime_osworld(routes: Routes[ProtocolSession]) -> None:
    """Add the protocol's routes. A session has the id of its episode."""
    callers = routes.callers
    routes.add_health("/health", lambda: {"status": "ok", "episodes": callers.episode_count()})
    routes.add("POST", "/reset", _reset)
    routes.add("POST", "/step", _step)
    routes.add("POST", "/render", _render)
    routes.add("POST", "/evaluate", _evaluate)
    routes.add("POST", "/close", _close)


async def _reset(
    _request: web.Request,
    caller: TokenHolder[ProtocolSession],
    *,
    task_config: dict[str, object],
    env_config: EnvSettings = _DEFAULTS,
) -> web.Response:
    episode = await env_config.open(caller, task_config)
    await caller.add(episode.episode_id, ProtocolSession(episode=episode))
    return json_response({"episode_id": episode.episode_id, **_shown(episode, episode.observation)})


async def _step(
    _request: web.Request, caller: TokenHolder[ProtocolSession], *, episode_id: str, action: str, pause: float = 2.0
) -> web.Response:
    with caller.using_episode(episode_id) as episode:
        observation, error = await act(episode, action, pause_s=pause)
        return json_response(
            {
                **_shown(episode, observation),
                "reward": 0.0,
                "done": episode.state is not State.ACTIVE,
                "step": episode.step_count,
                "info": {"error": error} if error else {},
            }
        )


async def _render(_request: web.Request, caller: TokenHolder[ProtocolSession], *, episode_id: str) -> web.Response:
    with caller.using_episode(episode_id) as episode:
        return json_response(_shown(episode, await episode.observe(refresh=True)))


async def _evaluate(_request: web.Request, caller: TokenHolder[ProtocolSession], *, episode_id: str) -> web.Response:
    with caller.using_episode(episode_id) as episode:
        return json_response({"reward": (await episode.evaluate()).score})


async def _close(_request: web.Request, caller: TokenHolder[ProtocolSession], *, episode_id: str) -> web.Response:
    await caller.close(episode_id)
    return json_response({"status": "closed", "episode_id": episode_id})
