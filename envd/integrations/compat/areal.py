"""The protocol of the remote server in AReaL's OSWorld example: `/envs`, `/envs/ID/{reset,obs,step,evaluate,close}`.

A session is a client's settings and at most one episode. Creating one never waits: a reset waits for a machine, in the
pool's queue.
"""

import uuid
from dataclasses import dataclass

from aiohttp import web

from envd.api.security.access import Caller
from envd.base.errors import EpisodeNotFound, InvalidRequest
from envd.desktop.observation import Observation
from envd.integrations.compat.osworld_env import EnvSettings
from envd.integrations.compat.protocols import Body, Routes, base64_png, json_response, read_body
from envd.integrations.compat.sessions import Sessions, SessionTable


class _Reset(Body):
    task_config: dict[str, object] | None = None


class _Step(Body):
    action: str
    pause: float = 0.0


class _Nothing(Body):
    pass


@dataclass(slots=True)
class _Session:
    owner: str
    settings: EnvSettings
    episode_id: str = ""


class Areal:
    """Serves the protocol on an application's routes."""

    def __init__(self, sessions: Sessions, routes: Routes) -> None:
        self._sessions = sessions
        self._known: SessionTable[str, _Session] = SessionTable()
        routes.add_health(
            "/health", lambda: {"status": "ok", "active_sessions": len(self._known), "max_envs": sessions.capacity}
        )
        routes.add("POST", "/envs", self._create, method="Reset")
        routes.add("POST", "/envs/{session_id}/reset", self._reset, method="Reset")
        routes.add("GET", "/envs/{session_id}/obs", self._observe, method="Observe")
        routes.add("POST", "/envs/{session_id}/step", self._step, method="Step")
        routes.add("POST", "/envs/{session_id}/evaluate", self._evaluate, method="Evaluate")
        routes.add("POST", "/envs/{session_id}/close", self._close, method="Close")

    async def _create(self, request: web.Request, caller: Caller) -> web.Response:
        settings = await read_body(request, EnvSettings)
        settings.check()
        session_id = uuid.uuid4().hex
        self._known.add(session_id, _Session(owner=caller.name, settings=settings))
        return json_response({"session_id": session_id})

    async def _reset(self, request: web.Request, caller: Caller) -> web.Response:
        session = self._session(request, caller)
        body = await read_body(request, _Reset)
        if body.task_config is None:
            raise InvalidRequest("task_config", "is required; an episode is one attempt at a task")
        task = self._sessions.task_of(body.task_config)
        session.settings.check(task)
        replaced, session.episode_id = session.episode_id, ""
        if replaced:
            await self._sessions.close(caller, replaced)
        result = await self._sessions.open(caller, task.task_id, observe=session.settings.view)
        episode_id, observation = result.episodes[0].episode_id, result.observations[0]
        try:
            session.settings.check_screen(observation.frame)
            self._session(request, caller)
        except Exception:
            await self._sessions.close(caller, episode_id)
            raise
        # Of two concurrent resets the later one counts.
        replaced, session.episode_id = session.episode_id, episode_id
        if replaced:
            await self._sessions.close(caller, replaced)
        return json_response({"obs": _observation(observation, instruction=result.instruction)})

    async def _observe(self, request: web.Request, caller: Caller) -> web.Response:
        session, episode_id = self._episode(request, caller)
        info = await self._sessions.info(episode_id)
        observation = await self._sessions.observe(episode_id, session.settings.view)
        return json_response({"obs": _observation(observation, instruction=self._sessions.instruction_of(info))})

    async def _step(self, request: web.Request, caller: Caller) -> web.Response:
        session, episode_id = self._episode(request, caller)
        body = await read_body(request, _Step)
        acted = await self._sessions.act(episode_id, body.action, pause_s=body.pause, observe=session.settings.view)
        instruction = self._sessions.instruction_of(acted.info)
        return json_response(
            {
                "obs": _observation(acted.observation, instruction=instruction),
                "reward": 0.0,
                "done": acted.done,
                "info": {"error": acted.error} if acted.error else {},
            }
        )

    async def _evaluate(self, request: web.Request, caller: Caller) -> web.Response:
        _, episode_id = self._episode(request, caller)
        await read_body(request, _Nothing)
        return json_response({"reward": await self._sessions.evaluate(episode_id)})

    async def _close(self, request: web.Request, caller: Caller) -> web.Response:
        await read_body(request, _Nothing)
        try:
            session = self._session(request, caller)
        except EpisodeNotFound:
            return json_response({"ok": True})
        self._known.remove(request.match_info["session_id"])
        if session.episode_id:
            await self._sessions.close(caller, session.episode_id)
        return json_response({"ok": True})

    def _session(self, request: web.Request, caller: Caller) -> _Session:
        session_id = request.match_info["session_id"]
        session = self._known.get(session_id)
        if session is None or not caller.may_use(session.owner):
            raise EpisodeNotFound(f"session {session_id}: not found, or closed; create one by POST /envs")
        self._known.touch(session_id)
        return session

    def _episode(self, request: web.Request, caller: Caller) -> tuple[_Session, str]:
        session = self._session(request, caller)
        if not session.episode_id:
            raise InvalidRequest("session", "has no episode yet; send its reset first")
        return session, session.episode_id


def _observation(observation: Observation, *, instruction: str) -> dict[str, object]:
    return {
        "screenshot_b64": base64_png(observation.frame),
        "accessibility_tree": observation.a11y_tree,
        "terminal": observation.terminal,
        "instruction": instruction,
    }
