"""What two protocols share with OSWorld's `DesktopEnv`: its settings, its task files, and its actions as text."""

import math
from typing import Any

from cuaenv.actions import Action
from cuaenv.agent_text.pyautogui_calls import parse_action
from cuaenv.agent_text.values import ParseError
from cuaenv.client import AsyncEpisode, Observation, State, Task, View
from cuaenv.client.errors import EpisodeEnded, TaskNotFound
from envd.base.aio import shielded
from envd.integrations.compat.callers import TokenHolder
from envd.integrations.compat.routes import Body, bad_field, base64_png
from envd.tasks.fields import task_name

_SYSTEMS = {"ubuntu": "linux", "linux": "linux", "windows": "windows"}
_MAX_PAUSE_S = 60.0
_POINTER_ONLY = View(encoding="none", cursor="reported")


class EnvSettings(Body):
    """Arguments of `DesktopEnv`. The daemon decides about machines, so those about providers have no effect."""

    action_space: str = "pyautogui"
    screen_size: tuple[int, int] | None = None
    os_type: str = "Ubuntu"
    require_a11y_tree: bool = True
    require_terminal: bool = False
    provider_name: str | None = None
    region: str | None = None
    path_to_vm: str | None = None
    snapshot_name: str | None = None
    cache_dir: str | None = None
    headless: bool = True
    enable_proxy: bool = False
    client_password: str | None = None

    @property
    def view(self) -> View:
        return View(
            encoding="png", a11y_tree=self.require_a11y_tree, a11y_format="osworld_xml", terminal=self.require_terminal
        )

    def check(self, task: Task | None = None) -> None:
        """Refuse what cannot be honoured. Raises: BadRequest."""
        if self.action_space != "pyautogui":
            raise bad_field("action_space", f"{self.action_space!r} is not supported; use pyautogui")
        if self.enable_proxy:
            raise bad_field("enable_proxy", "is not supported; a pool's allowed_hosts decide what guests reach")
        system = _SYSTEMS.get(self.os_type.lower())
        if system is None:
            raise bad_field("os_type", f"{self.os_type!r} is not supported; use Ubuntu or Windows")
        if task is not None and task.os != system:
            raise bad_field("os_type", f"{self.os_type!r} is not the system of task {task.task_id}")

    async def open(self, caller: TokenHolder[Any], task_config: dict[str, object]) -> AsyncEpisode:
        """Open an episode of the task that a client sends with a reset; a cancelled caller opens none.

        Raises:
            BadRequest: A setting or the task cannot be honoured, or the desktop has another size than the client
                scales points to.
            EnvError: See `Caller.open`.
        """
        task = await _task_of(caller, task_config)
        self.check(task)
        episode = await caller.open(task.task_id, view=self.view)
        actual = (episode.observation.screen_width_px, episode.observation.screen_height_px)
        if self.screen_size is not None and self.screen_size != actual:
            await episode.close()
            wanted = "x".join(map(str, self.screen_size))
            raise bad_field(
                "screen_size",
                f"{wanted} is not the desktop's {actual[0]}x{actual[1]}; set the client's screen_size, or the daemon's"
                f' pools.NAME.screen = "{wanted}"',
            )
        return episode


async def _task_of(caller: TokenHolder[Any], config: dict[str, object]) -> Task:
    """Return the daemon's task for the configuration that a client sends with a reset.

    Only the daemon's own task files decide what an episode sets up and checks.

    Raises:
        BadRequest: It has no id, or its instruction differs from the daemon's.
        TaskNotFound: No loaded task has its id.
    """
    given = config.get("id")
    if not isinstance(given, str) or not given:
        raise bad_field("task_config.id", "is not a task's id; send the task's JSON with its id")
    task = await _find(caller, given)
    instruction = config.get("instruction")
    if instruction is not None and instruction != task.instruction:
        raise bad_field(
            "task_config.instruction",
            f"differs from that of the daemon's task {task.task_id}; give both the same task files",
        )
    return task


async def _find(caller: TokenHolder[Any], given: str) -> Task:
    task_ids = [given] if "/" in given else await _named(caller, task_name(given))
    if len(task_ids) > 1:
        raise bad_field("task_config.id", f"{given!r} fits {', '.join(task_ids[:3])}; send one of these ids")
    found = await caller.client.list_tasks(task_ids=task_ids) if task_ids else []
    if not found:
        raise TaskNotFound(
            f"task {given!r}: not found; load it with --tasks or `envd osworld install --tasks`",
            code="NOT_FOUND",
            reason="TASK_NOT_FOUND",
        )
    return found[0]


async def _named(caller: TokenHolder[Any], name: str) -> list[str]:
    """Return the ids of the tasks with a name in any suite. All are listed only for a name that is not yet known."""

    def known() -> list[str]:
        return [task_id for task_id in caller.task_ids if task_id.endswith(f"/{name}")]

    if not known():
        caller.task_ids = tuple(task.task_id for task in await caller.client.list_tasks())
    return known()


def shown(episode: AsyncEpisode, observation: Observation, *, screenshot: str) -> dict[str, object]:
    """Return an observation as these protocols send it, with its picture under the name `screenshot`."""
    return {
        screenshot: base64_png(observation),
        "accessibility_tree": observation.a11y_tree,
        "terminal": observation.terminal,
        "instruction": episode.instruction,
    }


async def act(episode: AsyncEpisode, text: str, *, pause_s: float) -> tuple[Observation, str]:
    """Perform an action in OSWorld's form: pyautogui calls with literal arguments, or WAIT, DONE or FAIL.

    Returns what the screen then shows, and the agent's mistake, empty if there is none. Text without an action is such
    a mistake: nothing is performed, and the episode continues.

    Args:
        text: The action; it is parsed and never executed.
        pause_s: How long WAIT waits. After other actions the screen settles instead.

    Raises:
        BadRequest: The pause is not a number of 0 to 60 s.
        EnvError: See `AsyncEpisode.step`.
    """
    if not (math.isfinite(pause_s) and 0 <= pause_s <= _MAX_PAUSE_S):
        raise bad_field("pause", f"{pause_s} is not a number of 0 to {_MAX_PAUSE_S:g} seconds")
    pointer = (await episode.observe(_POINTER_ONLY)).cursor
    try:
        actions = parse_action(text, pause_s=pause_s, pointer=pointer)
    except (ParseError, RecursionError, MemoryError) as mistake:
        if episode.state is not State.ACTIVE:
            raise EpisodeEnded(
                f"episode {episode.episode_id}: ended after step {episode.step_count} ({episode.end_reason});"
                " reset a new one",
                code="FAILED_PRECONDITION",
                reason="EPISODE_ENDED",
            ) from mistake
        return await episode.observe(refresh=True), f"invalid action: {mistake}"
    return await perform(episode, actions)


async def perform(episode: AsyncEpisode, actions: list[Action]) -> tuple[Observation, str]:
    """Perform actions as one step; returns as `act`. Raises: see `AsyncEpisode.step`."""
    # To its end, also if the client leaves: its next step must know how many there were.
    result = await shielded(episode.step(*actions))
    return result.observation, "; ".join(result.errors)
