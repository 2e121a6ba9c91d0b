"""An OpenEnv environment whose episodes are sessions of `trainer.adapters.session`.

The reward comes with the last observation. A void episode has no reward: its last observation is `done` with a reward
of None and the reason in `metadata["void"]`. The MCP tools `act` and `look` return pictures as image content, because
some consumers turn the fields of an observation into text.
"""

import asyncio
import base64
from dataclasses import replace
from typing import Any

from fastmcp import FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.utilities.types import Image
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import EnvironmentMetadata, State

from cuaenv.client import EpisodeEnded
from trainer.adapters.actions import ActionForm
from trainer.adapters.background import blocking, in_background
from trainer.adapters.openenv.models import DesktopAction, DesktopObservation
from trainer.adapters.session import Session, SessionSettings, SessionVoid, open_session


class DesktopEnvironment(MCPEnvironment):
    """One session of a client."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, settings: SessionSettings, *, task: str = "") -> None:
        """Prepare; the first reset connects.

        Args:
            task: Task of a reset that names none; empty for none.
        """
        tools: FastMCP[None] = FastMCP("envd")
        super().__init__(tools)
        self._settings = settings
        self._task = task
        self._session: Session | None = None
        self._pictures = True

        @tools.tool(output_schema=None)
        async def act(actions: list[ActionForm]) -> list[Any]:
            """Perform actions in order, and return a picture. The last one returns the score."""
            seen = await self.step_async(DesktopAction(actions=actions))
            if seen.metadata.get("void"):
                raise ToolError(f"the episode is void: {seen.metadata['void']}")
            lines = [f"action {number}: {error}" for number, error in enumerate(seen.errors) if error]
            lines += [f"action {number}: {output}" for number, output in enumerate(seen.outputs) if output]
            if seen.done:
                lines.append(f"The episode has ended ({seen.end_reason}). score: {seen.reward}")
            return ["\n".join(lines) or "ok", self._picture()]

        @tools.tool(output_schema=None)
        async def look() -> list[Any]:
            """Return the instruction and a picture of the screen, of a new episode if none is open."""
            if self._session is None:
                await self.reset_async()
            return [self._open().instruction, self._picture()]

    async def reset_async(
        self, *, task: str = "", group: str | None = None, group_size: int = 1, pictures: bool = True, **_: Any
    ) -> DesktopObservation:
        """Close the session's episode and open another. OpenEnv's `seed` and `episode_id` are ignored.

        Args:
            task: Id of the task, or of a variant (`NAME?seed=N`); by default that of the server.
            group: Key of a group of sessions that start on forks of one state; by default the task.
            group_size: Its size.
            pictures: Whether observations have a screenshot; the MCP tools always return one.

        Raises:
            EnvError: The episode could not be opened.
            ValueError: No task is named, or the group's size is below 1.
        """
        task = task or self._task
        if not task:
            raise ValueError("reset: no task; pass task=, or set ENVD_TASK for the server")
        settings = replace(self._settings, group_size=group_size)
        self._pictures = pictures
        return await asyncio.wrap_future(in_background(self._reset(task, group, settings)))

    def reset(self, **options: Any) -> DesktopObservation:
        """`reset_async` for code without an event loop."""
        return asyncio.run(self.reset_async(**options))

    async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Perform actions; the step that ends the episode evaluates it.

        Raises:
            EnvError: No episode is open, it has ended, or the request is invalid; nothing was done.
        """
        if isinstance(action, DesktopAction):
            return await asyncio.wrap_future(in_background(self._step(self._open(), action)))
        return await super().step_async(action, timeout_s=timeout_s, **options)

    def _step_impl(self, action: DesktopAction, **_: Any) -> DesktopObservation:
        return blocking(self._step(self._open(), action))

    @property
    def state(self) -> State:
        """The episode's id and number of steps."""
        if self._session is None:
            return State()
        return State(episode_id=self._session.episode.episode_id, step_count=self._session.episode.step_count)

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="envd_desktop", description="Forkable desktop VMs for computer-use agents")

    def close(self) -> None:
        """Release the machine."""
        blocking(self._release())
        super().close()

    def _open(self) -> Session:
        if self._session is None:
            raise EpisodeEnded("no episode is open; call reset")
        return self._session

    async def _reset(self, task: str, group: str | None, settings: SessionSettings) -> DesktopObservation:
        await self._release()
        self._session = await open_session(task, settings=settings, group=group)
        return self._observation(self._session)

    async def _step(self, session: Session, action: DesktopAction) -> DesktopObservation:
        try:
            result = await session.step(*action.actions)
        except SessionVoid:
            return self._observation(session, done=True, metadata={"void": session.void})
        texts = {
            "errors": list(result.action_errors),
            "outputs": [tool.output if tool else "" for tool in result.tool_results],
        }
        if not result.done:
            return self._observation(session, **texts)
        score = await session.score()
        return self._observation(
            session,
            done=True,
            reward=score.reward,
            **texts,
            end_reason=result.end_reason,
            metadata={"void": score.void} if score.value is None else {},
        )

    async def _release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _observation(self, session: Session, **fields: Any) -> DesktopObservation:
        screenshot = base64.b64encode(session.observation.png).decode() if self._pictures else ""
        return DesktopObservation(instruction=session.instruction, screenshot=screenshot, **fields)

    def _picture(self) -> Image:
        return Image(data=self._open().observation.png, format="png")
