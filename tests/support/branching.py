"""Groups of the counting task that slime's hooks play, with the forks of their running episodes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envd.episodes.types import ForkCommand, OpenedGroup
from tests.support.counting import AGENT, PARAMS, TASK, counting
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import Sample, ScriptedEngine, Tokenizer, stand_in_args, stand_in_slime
from trainer.slime.hooks import generate


class World:
    """A daemon and an engine, and what was asked of them."""

    def __init__(self, server: FakeServer, engine: ScriptedEngine) -> None:
        self.server, self.engine = server, engine
        self.forks: list[int] = []
        """Copies of each fork."""
        perform = server.service.fork

        async def fork(command: ForkCommand) -> OpenedGroup:
            result = await perform(command)
            self.forks.append(command.fork_count)
            return result

        server.service.fork = fork

    async def rolled_out(
        self,
        count: int,
        replies: Any = (),
        *,
        agent: dict[str, Any] | None = None,
        evaluation: bool = False,
        **envd: Any,
    ) -> list[Any]:
        """Play a group, with `given_replies` in its row if there are any, and wait until its machines are returned."""
        mapping = {"hosts": [self.server.address], "engine_timeout_s": 60.0, **envd}
        self.args = stand_in_args({**mapping, "agent": {**AGENT, **(agent or {})}}, n_samples_per_prompt=count)
        metadata = {"task_id": TASK, **({} if replies is None else {"given_replies": replies})}
        group = [Sample(group_index=0, index=index, metadata=dict(metadata)) for index in range(count)]
        found = await asyncio.gather(*(generate(self.args, each, dict(PARAMS), evaluation) for each in group))
        async with asyncio.timeout(60):
            while self.server.pool.statistics().leased_count:
                await asyncio.sleep(0.01)
        return found

    @property
    def prompts(self) -> list[str]:
        return [Tokenizer().decode(request["input_ids"]) for request in self.engine.requests]

    @property
    def pictures(self) -> list[str]:
        """The latest picture of each request."""
        return [request["image_data"][-1] for request in self.engine.requests]


@asynccontextmanager
async def world(say: Any = counting, **options: Any) -> AsyncIterator[World]:
    engine = ScriptedEngine(say)
    async with serve_fake(**{"size": 2, "capacity": 8, **options}) as server:
        with stand_in_slime(engine):
            yield World(server, engine)
