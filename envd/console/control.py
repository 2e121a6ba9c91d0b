"""Routes by which a person in the page controls an episode, opens one, and has it scored.

They change something, so that a caller needs the rights over the episode that gRPC asks for, and the body must be JSON:
a page of another origin cannot send it without asking first, and is refused.
"""

import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from cuaenv.action_codec import BadAction, from_json
from cuaenv.actions import Action, Done, Fail, ToolAction, Wait
from envd.api.security.access import Scope
from envd.api.security.http import caller_of
from envd.base.errors import EnvdError, EpisodeNotFound, HumanInControl, InvalidRequest, RetryableError
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.service import EpisodeService
from envd.episodes.types import ResetCommand

#: Run of the episodes that are opened in the page.
RUN = "console"
#: Actions in a request. A page sends some every few milliseconds.
_MAX_ACTIONS = 100
_MAX_TASKS = 500
_MAX_STEPS = 200


def add_control(router: web.UrlDispatcher, episodes: EpisodeService) -> None:
    """Add the routes that act."""
    router.add_get("/api/tasks", _answers(partial(_tasks, episodes)))
    router.add_post("/api/episodes", _answers(partial(_open, episodes)))
    router.add_post("/api/episodes/{id}/control", _answers(partial(_take, episodes)))
    router.add_post("/api/episodes/{id}/actions", _answers(partial(_act, episodes)))
    router.add_post("/api/episodes/{id}/release", _answers(partial(_release, episodes)))
    router.add_post("/api/episodes/{id}/evaluate", _answers(partial(_evaluate, episodes)))
    router.add_post("/api/episodes/{id}/close", _answers(partial(_close, episodes)))


async def _tasks(episodes: EpisodeService, _request: web.Request) -> dict[str, Any]:
    """Return the tasks that a person may open."""
    tasks = sorted(episodes.tasks.list(), key=lambda task: task.task_id)
    return {"tasks": [{"id": task.task_id, "instruction": task.instruction} for task in tasks[:_MAX_TASKS]]}


async def _open(episodes: EpisodeService, request: web.Request) -> dict[str, Any]:
    caller, body = caller_of(request), await _body(request)
    if caller.scope < Scope.RUN:
        raise web.HTTPForbidden(text=f"token {caller.name}: scope run is needed to open episodes\n")
    from_checkpoint = "checkpoint" in body
    result = await episodes.reset(
        ResetCommand(
            request_id=secrets.token_hex(16),
            task_id="" if from_checkpoint else _text(body, "task"),
            checkpoint_id=_text(body, "checkpoint") if from_checkpoint else "",
            sees_all_owners=caller.scope is Scope.ADMIN,
            pool=str(body.get("pool", "")),
            run=RUN,
            owner=caller.name,
            max_machines=caller.max_machines,
            max_steps=None if from_checkpoint else _MAX_STEPS,
            observe=ObservationOptions(encoding=Encoding.NONE),
            timeout_s=120.0,
        )
    )
    return {"id": result.episodes[0].episode_id}


async def _take(episodes: EpisodeService, request: web.Request) -> dict[str, Any]:
    """Take or renew control."""
    episode_id, body = _own(episodes, request), await _body(request)
    ttl_s = episodes.take_control(episode_id, control_id=_text(body, "control"), holder=caller_of(request).name)
    return {"ttl_s": ttl_s}


async def _act(episodes: EpisodeService, request: web.Request) -> dict[str, Any]:
    """Perform actions; return the reason of each that the guest refused, empty for the others."""
    episode_id, body = _own(episodes, request), await _body(request)
    outcomes = await episodes.act(episode_id, control_id=_text(body, "control"), actions=_actions(body))
    return {"errors": [outcome.error for outcome in outcomes]}


async def _release(episodes: EpisodeService, request: web.Request) -> dict[str, Any]:
    episode_id, body = _own(episodes, request), await _body(request)
    await episodes.release_control(episode_id, control_id=_text(body, "control"))
    return {}


async def _evaluate(episodes: EpisodeService, request: web.Request) -> dict[str, Any]:
    """Hand back and score an episode that a person opened."""
    episode_id, body = _own(episodes, request), await _body(request)
    await episodes.release_control(episode_id, control_id=_text(body, "control"))
    episode = episodes.find(episode_id)
    if episode is None or episode.spec.run != RUN:
        raise InvalidRequest("episode", "only an episode that was opened in the console can be scored here")
    episode.human.observed()
    result = await episodes.evaluate(episode_id, request_id=f"console-{episode_id}", fingerprint=b"console")
    return {"score": result.score, "checks": [{"name": each.name, "score": each.score} for each in result.checks]}


async def _close(episodes: EpisodeService, request: web.Request) -> dict[str, Any]:
    """Close an episode that a person opened."""
    episode_id = _own(episodes, request)
    await _body(request)
    episode = episodes.find(episode_id)
    if episode is not None and episode.spec.run != RUN:
        raise InvalidRequest("episode", "only an episode that was opened in the console can be closed here")
    await episodes.close(episode_id)
    return {}


def _own(episodes: EpisodeService, request: web.Request) -> str:
    """Return the episode of a request whose caller may use it. Raises: EpisodeNotFound."""
    episode_id = request.match_info["id"]
    caller = caller_of(request)
    if caller.scope < Scope.RUN or not caller.may_use(episodes.owner_of(episode_id)):
        raise EpisodeNotFound(f"episode {episode_id}: not found, or your token may not control it")
    return episode_id


def _answers(route: Callable[[web.Request], Any]) -> Handler:
    """Return a handler that answers JSON, and errors as text with a status that the page tells apart."""

    async def handle(request: web.Request) -> web.Response:
        try:
            return web.json_response(await route(request))
        except HumanInControl as error:
            raise web.HTTPConflict(text=f"{error}\n") from error
        except RetryableError as error:
            headers = {"Retry-After": str(max(1, round(error.retry_after_s)))}
            raise web.HTTPServiceUnavailable(text=f"{error}\n", headers=headers) from error
        except EpisodeNotFound as error:
            raise web.HTTPNotFound(text=f"{error}\n") from error
        except EnvdError as error:
            raise web.HTTPUnprocessableEntity(text=f"{error}\n") from error

    return handle


async def _body(request: web.Request) -> dict[str, Any]:
    """Return the body, an object. Raises: HTTPUnsupportedMediaType, HTTPBadRequest."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send application/json\n")
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="malformed body; send a JSON object\n")
    return body


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= 200:
        raise InvalidRequest(name, "must be a text of 1 to 200 characters")
    return value


def _actions(body: dict[str, Any]) -> list[Action]:
    values = body.get("actions")
    if not isinstance(values, list) or not 1 <= len(values) <= _MAX_ACTIONS:
        raise InvalidRequest("actions", f"must be a list of 1 to {_MAX_ACTIONS} actions")
    try:
        actions = [from_json(value) for value in values]
    except BadAction as error:
        raise InvalidRequest("actions", str(error)) from error
    # Tools are the agent's: what the task and the pool allow is checked in its steps.
    if any(isinstance(action, Done | Fail | Wait | ToolAction) for action in actions):
        raise InvalidRequest("actions", "a person uses no tools, and does not wait or end the episode by an action")
    return actions
