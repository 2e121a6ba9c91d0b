"""The protocol of Slime-OSWorld's environment server: `/reset`, `/step`, `/render`, `/evaluate`, `/close`, `/health`.

Differences from that server, all in the client's favour: a full pool queues a reset instead of closing the oldest
episode, a failed evaluation is an error instead of `{"reward": 0.0}`, and `/render` returns the present screen.
"""

from collections import OrderedDict

from aiohttp import web

from envd.api.security.access import Caller
from envd.desktop.observation import Observation, ObservationOptions
from envd.integrations.compat.osworld_env import EnvSettings
from envd.integrations.compat.protocols import Body, Routes, base64_png, json_response, read_body
from envd.integrations.compat.sessions import Sessions

#: Episodes whose settings are remembered; those of older ones are the defaults.
_MAX_REMEMBERED = 4096


class _Reset(Body):
    task_config: dict[str, object]
    env_config: EnvSettings = EnvSettings()


class _Episode(Body):
    episode_id: str


class _Step(_Episode):
    action: str
    pause: float = 2.0


class SlimeOsworld:
    """Serves the protocol on an application's routes."""

    def __init__(self, sessions: Sessions, routes: Routes) -> None:
        self._sessions = sessions
        self._routes = routes
        self._settings: OrderedDict[str, EnvSettings] = OrderedDict()
        routes.add_health("/health", lambda: {"status": "ok", "episodes": sessions.episode_count()})
        routes.add("POST", "/reset", self._reset, method="Reset")
        routes.add("POST", "/step", self._step, method="Step")
        routes.add("POST", "/render", self._render, method="Observe")
        routes.add("POST", "/evaluate", self._evaluate, method="Evaluate")
        routes.add("POST", "/close", self._close, method="Close")

    async def _reset(self, request: web.Request, caller: Caller) -> web.Response:
        body = await read_body(request, _Reset)
        task = self._sessions.task_of(body.task_config)
        body.env_config.check(task)
        result = await self._sessions.open(caller, task.task_id, observe=body.env_config.view)
        episode_id = result.episodes[0].episode_id
        try:
            body.env_config.check_screen(result.observations[0].frame)
        except Exception:
            await self._sessions.close(caller, episode_id)
            raise
        self._settings[episode_id] = body.env_config
        if len(self._settings) > _MAX_REMEMBERED:
            self._settings.popitem(last=False)
        return json_response(
            {"episode_id": episode_id, **_observation(result.observations[0], instruction=result.instruction)}
        )

    async def _step(self, request: web.Request, caller: Caller) -> web.Response:
        body = await read_body(request, _Step)
        self._routes.admit(caller, body.episode_id)
        acted = await self._sessions.act(
            body.episode_id, body.action, pause_s=body.pause, observe=self._view(body.episode_id)
        )
        return json_response(
            {
                **_observation(acted.observation, instruction=self._sessions.instruction_of(acted.info)),
                "reward": 0.0,
                "done": acted.done,
                "step": acted.info.step_count,
                "info": {"error": acted.error} if acted.error else {},
            }
        )

    async def _render(self, request: web.Request, caller: Caller) -> web.Response:
        body = await read_body(request, _Episode)
        self._routes.admit(caller, body.episode_id)
        info = await self._sessions.info(body.episode_id)
        observation = await self._sessions.observe(body.episode_id, self._view(body.episode_id))
        return json_response(_observation(observation, instruction=self._sessions.instruction_of(info)))

    async def _evaluate(self, request: web.Request, caller: Caller) -> web.Response:
        body = await read_body(request, _Episode)
        self._routes.admit(caller, body.episode_id)
        return json_response({"reward": await self._sessions.evaluate(body.episode_id)})

    async def _close(self, request: web.Request, caller: Caller) -> web.Response:
        body = await read_body(request, _Episode)
        await self._sessions.close(caller, body.episode_id)
        self._settings.pop(body.episode_id, None)
        return json_response({"status": "closed", "episode_id": body.episode_id})

    def _view(self, episode_id: str) -> ObservationOptions:
        return self._settings.get(episode_id, EnvSettings()).view


def _observation(observation: Observation, *, instruction: str) -> dict[str, object]:
    return {
        "screenshot_base64": base64_png(observation.frame),
        "accessibility_tree": observation.a11y_tree,
        "terminal": observation.terminal,
        "instruction": instruction,
    }
