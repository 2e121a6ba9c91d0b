"""The agent loop over a real socket: a scripted model, a real daemon, drawn desktops."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from cuaenv.client import Action, Click, Done, Drag, Fail, PressKeys, TypeText, Wait
from tests.support.scripted_replies import ScriptedReplies
from tests.support.server import served_client
from trainer.agent.attempts import play_task
from trainer.agent.coordinates import CoordinateSpace, to_model_points
from trainer.agent.grammars import grammar
from trainer.agent.loop import play_episode
from trainer.agent.settings import AgentSettings
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Outcome, Reply

SETTINGS = AgentSettings(max_turns=6)
SPACE = CoordinateSpace.of("normalised", image_px=(1248, 800), screen_px=(1280, 800))

SOLUTIONS: dict[str, Sequence[Sequence[Action]]] = {
    "fake/save-note": [[Click(379, 311)], [TypeText("Hello, fake desktop!")], [Click(82, 86)], [Done()]],
    "fake/count-to-five": [[Click(819, 100, count=3), Click(819, 100, count=2)], [Done()]],
    "fake/unicode-note": [[Click(379, 311), TypeText("Grüße, 漢字\n5 €")], [PressKeys(("ctrl", "s"))], [Done()]],
    "fake/move-and-count": [
        [Drag(900, 54, 400, 254), Click(319, 300, count=2)],
        [Click(100, 450), TypeText("moved"), PressKeys(("ctrl", "s"))],
        [Done()],
    ],
    "fake/no-printer": [[Fail()]],
}


def solution(task_id: str, settings: AgentSettings = SETTINGS) -> list[str]:
    form = grammar(settings.grammar)
    return [form.render([to_model_points(action, SPACE) for action in turn]) for turn in SOLUTIONS[task_id]]


@pytest.mark.parametrize("task_id", SOLUTIONS)
async def test_a_correct_solution_scores_one(task_id: str) -> None:
    async with served_client(size=1) as (_, client):
        model = ScriptedReplies(solution(task_id))
        trajectory = await play_task(client, task_id, lambda: model, settings=SETTINGS)
    assert trajectory.error is None
    assert trajectory.outcome is Outcome.TERMINATED
    assert trajectory.evaluation is not None
    assert trajectory.evaluation.score == 1.0
    assert [turn.facts.errors for turn in trajectory.turns] == [()] * len(trajectory.turns)
    assert all(turn.facts.parsed and turn.facts.actions[0].executed for turn in trajectory.turns)
    assert set(trajectory.timings_s) == {"reset", "model", "step", "evaluate"}


async def test_facts_record_changes_and_mistakes_are_reported_to_the_model() -> None:
    replies = [
        "I do not know what to do.",
        grammar("qwen3-vl").render([Click(2000, 5)]),
        grammar("qwen3-vl").render([PressKeys(("nosuchkey",))]),
        grammar("qwen3-vl").render([to_model_points(Click(819, 100), SPACE)]),
        grammar("qwen3-vl").render([Wait(timedelta(seconds=0.1))]),
        grammar("qwen3-vl").render([Done()]),
    ]
    model = ScriptedReplies(replies)
    async with served_client(size=1) as (_, client):
        trajectory = await play_task(client, "fake/count-to-five", lambda: model, settings=SETTINGS)
    prose, outside, unknown, click, wait, _ = (turn.facts for turn in trajectory.turns)
    assert (prose.parsed, prose.actions, prose.changed_fraction) == (False, (), 0.0)
    assert "<tool_call>" in prose.errors[0]
    assert outside.parsed
    assert not outside.actions[0].executed
    assert "outside the picture" in outside.errors[0]
    assert not unknown.actions[0].executed
    assert "nosuchkey" in unknown.errors[0]
    assert click.changed_fraction is not None
    assert 0 < click.changed_fraction < 0.1
    assert wait.changed_fraction == 0.0
    at = click.actions[0].point_px
    assert at is not None
    assert abs(at[0] - 819) <= 1
    assert abs(at[1] - 100) <= 1
    (row,) = model.rows
    texts = [part for message in row if message.role == "user" for part in message.parts if isinstance(part, str)]
    assert texts[1].startswith("Nothing was done: the reply has no <tool_call>")
    assert "outside the picture" in texts[2]
    assert "nosuchkey" in texts[3]
    assert trajectory.evaluation is not None
    assert trajectory.evaluation.score == 0.0


async def test_new_rows_drop_old_screenshots_and_old_rows_are_unchanged() -> None:
    settings = AgentSettings(max_turns=6, images_per_row=2, images_kept=1)
    model = ScriptedReplies(solution("fake/save-note", settings))
    async with served_client(size=1) as (_, client):
        trajectory = await play_task(client, "fake/save-note", lambda: model, settings=settings)
    assert trajectory.evaluation is not None
    assert trajectory.evaluation.score == 1.0
    assert [turn.row for turn in trajectory.turns] == [0, 0, 1, 1]
    images = [[sum(not isinstance(part, str) for part in message.parts) for message in row] for row in model.rows]
    assert images == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 0, 1, 0]]


async def test_a_text_only_agent_sees_the_tree_and_no_image() -> None:
    settings = AgentSettings(max_turns=6, text_only=True, a11y_tree=True, coordinates="pixels")
    async with served_client(size=1) as (_, client):
        model = ScriptedReplies([grammar("qwen3-vl").render([action]) for action in (Click(822, 167), Done())])
        trajectory = await play_task(client, "fake/enable", lambda: model, settings=settings)
    assert trajectory.evaluation is not None
    assert trajectory.evaluation.score == 1.0
    assert all(isinstance(part, str) for message in model.rows[0] for part in message.parts)
    assert trajectory.turns[0].facts.tree_before is not None
    assert "Enabled" in trajectory.turns[0].facts.tree_before
    assert any(
        left <= 822 < left + width and top <= 167 < top + height
        for left, top, width, height in trajectory.turns[0].facts.boxes_before
    )


async def test_an_unchanged_screen_is_not_repeated_if_so_configured() -> None:
    settings = AgentSettings(max_turns=6, repeat_images=False)
    turns: list[list[Action]] = [[Wait(timedelta(seconds=0.1))], [to_model_points(Click(819, 100), SPACE)], [Done()]]
    model = ScriptedReplies([grammar("qwen3-vl").render(turn) for turn in turns])
    async with served_client(size=1) as (_, client):
        trajectory = await play_task(client, "fake/count-to-five", lambda: model, settings=settings)
    assert trajectory.turns[0].facts.changed_fraction == 0.0
    (row,) = model.rows
    messages = [message.parts for message in row if message.role == "user"]
    assert messages[1] == ("Done. The screen looks exactly as before.",)
    assert [len(parts) for parts in messages] == [2, 1, 2]


async def test_the_tree_shows_the_numbers_of_marks() -> None:
    settings = AgentSettings(max_turns=6, marks=True, a11y_tree=True, a11y_chars=1000)
    model = ScriptedReplies([grammar("qwen3-vl").render([Done()])])
    async with served_client(size=1) as (_, client):
        trajectory = await play_task(client, "fake/enable", lambda: model, settings=settings)
    assert trajectory.turns[0].facts.tree_before is not None
    assert "[1] " in trajectory.turns[0].facts.tree_before


async def test_an_episode_offers_branch_points_and_their_duration_is_not_charged() -> None:
    points: list[tuple[BranchPoint, float]] = []

    async def offer_branch(_: int, __: Reply, branch_point: Callable[[], BranchPoint]) -> None:
        points.append((branch_point(), asyncio.get_running_loop().time()))
        await asyncio.sleep(0.5)

    async with served_client(size=1) as (_, client):
        model = ScriptedReplies(solution("fake/save-note"))
        async with client.reset("fake/save-note", view=SETTINGS.view) as episode:
            trajectory = await play_episode(episode, model, settings=SETTINGS, offer_branch=offer_branch)
    assert (trajectory.reason, [len(point.turns) for point, _ in points]) == ("done", [1, 2, 3])
    (first, first_s), (second, second_s), _ = points
    assert second.spent_s - first.spent_s < second_s - first_s - 0.4


async def continued(replies: Sequence[str]) -> ScriptedReplies:
    """Return a model that already has a row."""
    model = ScriptedReplies(replies)
    await model.begin([])
    return model


async def test_a_branch_continues_its_history_and_has_only_the_remaining_time() -> None:
    points: list[BranchPoint] = []

    async def offer_branch(_: int, __: Reply, branch_point: Callable[[], BranchPoint]) -> None:
        points.append(branch_point())

    replies = solution("fake/save-note")
    async with served_client(size=2, capacity=3) as (_, client):
        async with client.reset("fake/save-note", view=SETTINGS.view) as episode:
            model = ScriptedReplies([replies[0], replies[-1]])
            first = await play_episode(episode, model, settings=SETTINGS, offer_branch=offer_branch)
        async with client.reset("fake/save-note", view=SETTINGS.view) as episode:
            await episode.step(Click(379, 311))
            [point] = points
            second = await play_episode(episode, await continued(replies[1:]), settings=SETTINGS, branch_point=point)
        late = replace(point, spent_s=SETTINGS.timeout_s + 1)
        async with client.reset("fake/save-note", view=SETTINGS.view) as episode:
            third = await play_episode(episode, await continued(replies[1:]), settings=SETTINGS, branch_point=late)
    scores = [trajectory.evaluation.score for trajectory in (first, second, third) if trajectory.evaluation]
    assert (scores[1], scores[0] < 1, scores[2] < 1) == (1.0, True, True)
    assert second.turns[:1] == first.turns[:1]
    assert (len(second.turns), second.shared_turn_count, second.origin) == (4, 1, first.origin)
    assert third.reason == "time"
