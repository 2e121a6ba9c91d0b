"""Groups for AReaL over gRPC on drawn desktops, with a double of its engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cuaenv.client import AsyncEnvClient
from tests.support.areal import ScriptedEngine, group_of
from tests.support.counting import AGENT, PLAN, SAY, counting, counting_apart
from tests.support.faulty import Faults
from tests.support.guest_ends import POWER_OFF, end_guests
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import END, Processor, Tokenizer
from trainer.adapters.areal.group import ArealConfig, play_group
from trainer.adapters.areal.rows import columns
from trainer.config import InputError
from trainer.tokens.chat import Chat

TEXT_ONLY = {**AGENT, "text_only": True, "a11y_tree": True}
ROW = {"task_id": "fake/count-to-five"}


async def live(
    server: FakeServer, say: Callable[[str], str] = counting, *, engine: ScriptedEngine | None = None, **changed: Any
) -> Any:
    mapping = {"hosts": [server.address], "group_size": 2, "agent": AGENT, **changed}
    config = ArealConfig.from_mapping(mapping)
    engine = engine or ScriptedEngine(say)
    async with AsyncEnvClient(config.hosts) as client:
        return await group_of(client, ROW, engine, chat=Chat(Tokenizer(), Processor()), config=config)


@asynccontextmanager
async def desktops(**options: Any) -> AsyncIterator[FakeServer]:
    async with serve_fake(**{"size": 2, **options}) as server:
        yield server
        assert server.pool.statistics().leased_count == 0


async def test_each_turn_of_a_group_is_a_row_of_the_engines_ids() -> None:
    engine = ScriptedEngine(counting)
    async with desktops() as server:
        result = await live(server, engine=engine)
    assert len(result.rows) == len(engine.requests) == 6
    by_prompt = sorted(engine.requests, key=lambda request: len(request.input_ids))
    by_length = sorted(result.rows, key=lambda turn: len(turn.input_ids))
    assert [list(turn.input_ids) for turn in by_length] == [request.input_ids for request in by_prompt]
    assert (
        [len(turn.images) for turn in by_length] == [len(request.images) for request in by_prompt] == [1, 1, 2, 2, 3, 3]
    )
    said = [Tokenizer().decode(row.output_ids) for row in result.rows[:3]]
    assert said == [SAY(actions) + END for actions in PLAN]
    assert [row.value for row in result.rows] == pytest.approx([0.81, 0.9, 1.0] * 2)
    assert {version for row in result.rows for version in row.versions} == {3}
    assert result.metrics["reward"] == [1.0, 1.0]
    assert result.metrics["void"] == [0.0, 0.0]


async def test_every_row_starts_with_the_previous_one() -> None:
    async with desktops() as server:
        first, second, third = (await live(server, group_size=1)).rows
    for earlier, later in ((first, second), (second, third)):
        so_far = earlier.input_ids + earlier.output_ids
        assert later.input_ids[: len(so_far)] == so_far


async def test_an_episode_on_a_lost_machine_is_omitted_and_not_scored_zero() -> None:
    async with desktops(faults=Faults(die_after_inputs=0)) as server:
        result = await live(server, attempts=1)
    assert (list(result.rows), result.metrics["reward"], result.metrics["void"]) == ([], [], [1.0, 1.0])


async def test_an_engine_failure_for_one_member_spares_the_other() -> None:
    asked = 0

    def say(prompt: str) -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("request failed after all retries")
        return counting(prompt)

    async with desktops() as server:
        result = await live(server, say)
    assert len(result.rows) == 3
    assert (result.metrics["reward"], sorted(result.metrics["void"])) == ([1.0], [0.0, 1.0])


async def test_an_episode_is_void_if_the_engine_read_other_ids() -> None:
    engine = ScriptedEngine(counting)
    engine.misread = True
    async with desktops() as server:
        result = await live(server, engine=engine)
    assert not result.rows
    assert result.metrics["void"] == [1.0, 1.0]


async def test_an_episode_is_void_after_the_engines_timeout() -> None:
    class Silent(ScriptedEngine):
        async def ask(self, *_: object) -> Any:
            await asyncio.sleep(600)

    engine = Silent(counting)
    async with desktops() as server:
        result = await live(server, engine=engine, engine_timeout_s=0.2)
    assert result.metrics["void"] == [1.0, 1.0]


async def test_unreadable_replies_are_trained_on() -> None:
    async with desktops() as server:
        result = await live(server, lambda prompt: "I would rather not")
    assert len(result.rows) == 8
    assert {row.value for row in result.rows} == {0.0}
    assert result.metrics["truncated"] == [1.0, 1.0]


async def test_without_pictures_no_image_is_sent() -> None:
    async with desktops() as server:
        engine = ScriptedEngine(counting)
        result = await live(server, engine=engine, agent=TEXT_ONLY)
    assert len(result.rows) == 6
    assert not any(request.images for request in engine.requests)
    assert "mm_token_type_ids" not in columns(result.rows, image_id=None)


async def test_old_screenshots_are_omitted_from_later_turns_only() -> None:
    async with desktops() as server:
        result = await live(server, group_size=1, agent={**AGENT, "images_per_row": 2, "images_kept": 1})
    assert [len(row.images) for row in result.rows] == [1, 2, 1]
    assert result.metrics["reward"] == [1.0]


async def test_a_data_set_row_without_a_task_is_refused() -> None:
    config = ArealConfig.from_mapping({"hosts": ["127.0.0.1:1"]})
    async with AsyncEnvClient(config.hosts) as client:
        with pytest.raises(InputError, match=r"no task id; add task_id .*it has prompt"):
            await play_group(
                client, {"prompt": "x"}, ScriptedEngine(counting).ask, chat=Chat(Tokenizer()), config=config
            )


async def test_episodes_whose_guests_ended_are_valid_and_worth_less_than_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end_guests(monkeypatch)
    async with desktops() as server:
        result = await live(server, lambda _: SAY([POWER_OFF]))
    assert [row.value for row in result.rows] == [-0.1, -0.1]
    assert result.metrics["ended_by_guest"] == [1.0, 1.0]
    assert result.metrics["task_score"] == result.metrics["void"] == result.metrics["undecided"] == [0.0, 0.0]


async def test_members_of_a_tree_branch_and_each_turn_is_one_row_with_the_credit_of_its_siblings() -> None:
    engine = ScriptedEngine(counting_apart())
    async with desktops() as server:
        result = await live(server, engine=engine, group="tree", branch_every=1, credit="siblings", attempts=1)
    assert sorted(result.metrics["reward"]) == [0.0, 1.0]
    assert result.metrics["branched"] == [0.0, 1.0]
    # Each reply of the engine is one row: the shared turn is not repeated.
    asked_for = sorted(request.input_ids for request in engine.requests)
    assert sorted(list(row.input_ids) for row in result.rows) == asked_for
    values = {(len(row.images), row.value) for row in result.rows}
    assert values == {(1, 0.0), (2, 1.0), (2, -1.0), (3, 1.0)}
