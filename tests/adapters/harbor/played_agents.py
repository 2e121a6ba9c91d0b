"""Agents that Harbor imports by name. The tests set `midway`, which runs between their two actions."""

from collections.abc import Awaitable, Callable
from typing import Any

from harbor.agents.base import BaseAgent

from cuaenv.client import Click, Done

midway: Callable[[Any], Awaitable[None]] | None = None


class ClickAgent(BaseAgent):  # type: ignore[misc]
    @staticmethod
    def name() -> str:
        return "click"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None: ...

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.session.step(Click(822, 167))
        if midway is not None:
            await midway(environment)
        await environment.session.step(Done())
