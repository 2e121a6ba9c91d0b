"""An oracle in place of a model: its replies in every grammar, and its waits."""

import json
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from PIL import Image

from cuaenv.client import Action, Click, Done, Drag, Move, PressKeys, TypeText, Wait
from envd.cli.tasks_oracles import oracle_line
from tests.support.server import load_fake_tasks
from trainer.agent.coordinates import CoordinateSpace, to_screen_points
from trainer.agent.grammars import GRAMMARS
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message, ModelFailed
from trainer.data.oracles import Oracle, read_oracles
from trainer.data.record import OracleConversation
from trainer.data.transcripts import is_trained

SCREEN = (1280, 800)


def picture(shade: int = 0) -> Message:
    return Message("user", (Image.new("L", (640, 416), shade).convert("RGB"), "Look."))


def conversation_of(
    *steps: Sequence[Action],
    grammar: str = "qwen3-vl",
    patience_s: Sequence[float] = (),
    slow_steps: Collection[int] = (),
) -> OracleConversation:
    oracle = Oracle(task_id="a/b", steps=tuple(map(tuple, steps)), slow_steps=frozenset(slow_steps))
    return OracleConversation(oracle, AgentSettings(grammar=grammar), screen_px=SCREEN, patience_s=patience_s)


def trained_of(conversation: OracleConversation) -> set[int]:
    (context,) = conversation.contexts
    return {index for index, message in enumerate(context.messages) if is_trained(message)}


async def replies_of(conversation: OracleConversation, shades: Sequence[int]) -> list[str]:
    texts = []
    await conversation.begin([Message("system", ("Act.",)), picture(shades[0])])
    for shade in shades[1:]:
        texts.append((await conversation.generate()).text)
        await conversation.append(picture(shade))
    return texts


@pytest.mark.parametrize("name", GRAMMARS)
async def test_an_oracles_replies_are_parsed_as_its_actions(name: str) -> None:
    settings = AgentSettings(grammar=name)
    steps: list[list[Action]] = [[TypeText("a b")], [PressKeys(["ctrl", "s"])], [Done()]]
    if name != "verbs":  # it has no mouse
        steps = [[Drag(900, 54, 400, 254)], [Click(319, 300, count=2), TypeText("x")], *steps]
    conversation = conversation_of(*steps, grammar=name)
    space = CoordinateSpace.of(settings.units, image_px=(640, 416), screen_px=SCREEN)
    done: list[Action] = []
    await conversation.begin([picture(0)])
    while Done() not in done:
        parsed = settings.make_grammar().parse((await conversation.generate()).text, space.picture())
        assert parsed.parsed, parsed.error
        done += [to_screen_points(action, space) for action in parsed.actions]
        await conversation.append(picture(len(done)))
    texts = "".join(action.text for action in done if isinstance(action, TypeText))
    assert texts == ("a b" if name == "verbs" else "xa b")
    if name != "verbs":
        assert isinstance(done[0], Move | Drag)
        [click] = [action for action in done if isinstance(action, Click)]
        # Units of 1/1000 of the picture are exact to 2 px of the screen.
        assert click.x == pytest.approx(319, abs=2)
        assert click.y == pytest.approx(300, abs=2)


async def test_it_waits_increasingly_long_while_the_screen_is_unchanged() -> None:
    conversation = conversation_of([TypeText("a")], [TypeText("b")], [Done()], patience_s=(1, 2))
    texts = await replies_of(conversation, [0, 0, 0, 0, 5, 5])
    grammar = AgentSettings().make_grammar()
    read = [
        grammar.parse(text, CoordinateSpace.of("normalised", image_px=SCREEN, screen_px=SCREEN).picture())
        for text in texts
    ]
    assert [type(parsed.actions[0]) for parsed in read] == [TypeText, Wait, Wait, TypeText, Done]
    assert trained_of(conversation) == {2, 8, 10}


@pytest.mark.parametrize(
    ("steps", "slow_steps", "shades", "trained"),
    [
        ([[TypeText("a")], [TypeText("b")]], [], [0, 1, 2], {2, 4}),
        ([[Wait(timedelta(seconds=3))], [Done()]], [], [0, 0, 0], {2, 4}),
        ([[Click(1, 1)], [Done()]], [0], [0, 0, 1, 1, 1], {2, 8}),
        ([[Click(1, 1)], [Done()]], [0], [0, 1, 2, 3, 3, 3], {2, 10}),
        ([[Click(1, 1)], [Done()]], [0], [0, 1, 2, 3, 4, 5], {2, 10}),
    ],
    ids=[
        *("not after a change of the screen", "not after a wait"),
        "a step with a condition: for the change, and once without a change",
        "a step with a condition: while the screen changes",
        "a step with a condition: twice if it never is still",
    ],
)
async def test_it_waits_for_a_screen_that_changes_and_is_still(
    steps: Sequence[Sequence[Action]], slow_steps: Collection[int], shades: Sequence[int], trained: set[int]
) -> None:
    conversation = conversation_of(*steps, patience_s=(1, 2), slow_steps=slow_steps)
    await replies_of(conversation, shades)
    assert trained_of(conversation) == trained


async def test_a_message_without_an_image_means_an_unchanged_screen() -> None:
    conversation = conversation_of([TypeText("a")], [Done()], patience_s=(1,))
    await conversation.begin([picture(0)])
    await conversation.generate()
    await conversation.append(Message("user", ("Done. The screen looks exactly as before.",)))
    assert "wait" in (await conversation.generate()).text


async def test_an_oracle_without_more_steps_is_void() -> None:
    conversation = conversation_of([TypeText("a")])
    with pytest.raises(ModelFailed, match="no more steps"):
        await replies_of(conversation, [0, 1, 2])


async def test_an_action_that_the_grammar_cannot_express_is_void() -> None:
    conversation = conversation_of([Click(1, 1)], grammar="verbs")
    with pytest.raises(ModelFailed, match="verbs"):
        await replies_of(conversation, [0, 1])


def test_conditions_of_oracles_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "oracles.jsonl"
    steps = [[{"press": ["ctrl", "s"]}, {"wait_for": {"window": {"title": "Save as"}}}], [{"done": ""}]]
    path.write_text(json.dumps({"task_id": "a/b", "steps": steps}))
    [oracle] = read_oracles(path)
    assert oracle.steps == ((PressKeys(("ctrl", "s")),), (Done(),))
    assert oracle.slow_steps == {0}


def test_oracles_are_read_as_the_daemon_prints_them(tmp_path: Path) -> None:
    path = tmp_path / "oracles.jsonl"
    tasks = load_fake_tasks().list()
    path.write_text("\n".join(json.dumps(oracle_line(task)) for task in tasks))
    read = {oracle.task_id: oracle.steps for oracle in read_oracles(path)}
    assert set(read) == {task.task_id for task in tasks}
    assert read["fake/move-and-count"] == (
        (Drag(900, 54, 400, 254),),
        (Click(319, 300, count=2),),
        (Click(100, 450), TypeText("moved"), PressKeys(("ctrl", "s"))),
        (Done(),),
    )
