"""The protocol of Slime-OSWorld's environment server: `/reset`, `/step`, `/render`, `/evaluate`, `/close`, `/health`.

Differences from that server, all in the client's favour: a full pool queues a reset instead of closing the oldest
episode, a failed evaluation is an error instead of `{"reward": 0.0}`, and `/render` returns the present screen.
"""

from functools import partial

from aiohttp import web

from cuaenv.client import State
from envd.integrations.compat.callers import ProtocolSession, TokenHolder
from envd.integrations.compat.osworld_env import EnvSettings, act, shown
from envd.integrations.compat.routes import Body, Routes, json_response, read_body

_shown = partial(shown, screenshot="screenshot_base64")


class _SlimeReset(Body):
    task_config: dict[str, object]
    env_config: EnvSettings = EnvSettings()


class _OfEpisode(Body):
    episode_id: str


class _SlimeStep(_OfEpisode):
    action: str
    pause: float = 2.0


class SlimeOsworld:
    """Serves the protocol on an application's routes. A session has the id of its episode."""

    def __init__(self, routes: Routes[ProtocolSession]) -> None:
        callers = routes.callers
        routes.add_health("/health", lambda: {"status": "ok", "episodes": callers.episode_count()})
        routes.add("POST", "/reset", self._reset)
        routes.add("POST", "/step", self._step)
        routes.add("POST", "/render", self._render)
        routes.add("POST", "/evaluate", self._evaluate)
        routes.add("POST", "/close", self._close)

    async def _reset(self, request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
        body = await read_body(request, _SlimeReset)
        episode = await body.env_config.open(caller, body.task_config)
        await caller.add(episode.episode_id, ProtocolSession(episode=episode))
        return json_response({"episode_id": episode.episode_id, **_shown(episode, episode.observation)})

    async def _step(self, request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
        body = await read_body(request, _SlimeStep)
        with caller.using_episode(body.episode_id) as episode:
            acted = await act(episode, body.action, pause_s=body.pause)
            return json_response(
                {
                    **_shown(episode, acted.observation),
                    "reward": 0.0,
                    "done": episode.state is not State.ACTIVE,
                    "step": episode.step_count,
                    "info": {"error": acted.error} if acted.error else {},
                }
            )

    async def _render(self, request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
        body = await read_body(request, _OfEpisode)
        with caller.using_episode(body.episode_id) as episode:
            return json_response(_shown(episode, await episode.observe(refresh=True)))

    async def _evaluate(self, request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
        body = await read_body(request, _OfEpisode)
        with caller.using_episode(body.episode_id) as episode:
            return json_response({"reward": (await episode.evaluate()).score})

    async def _close(self, request: web.Request, caller: TokenHolder[ProtocolSession]) -> web.Response:
        body = await read_body(request, _OfEpisode)
        await caller.close(body.episode_id)
        return json_response({"status": "closed", "episode_id": body.episode_id})
