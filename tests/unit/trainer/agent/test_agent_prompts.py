"""The messages to the model, and the digest that proves that two runs use the same prompts."""

import io
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cuaenv.client import Element, Observation
from trainer.agent import prompts
from trainer.agent.coordinates import CoordinateSpace
from trainer.agent.grammars import Picture
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message

SPACE = CoordinateSpace.of("pixels", image_px=(640, 400), screen_px=(1280, 800))
SHOWN = (
    Element(role="frame", name="Editor", states=("active",), box=(0, 0, 1280, 800)),
    Element(role="push-button", name="Save", box=(60, 70, 40, 20), depth=1, is_actionable=True, mark=1),
    Element(role="entry", name="", value="Hello", box=(100, 100, 200, 100), depth=1, is_actionable=True, mark=2),
    Element(role="panel", name="", box=(0, 0, 10, 10)),
)
RENDERED = [
    "frame 'Editor' (active) at 320, 200",
    "[1] push-button 'Save' at 40, 40",
    "[2] entry '' = 'Hello' at 100, 75",
]


def observation(**more: object) -> Observation:
    made = Observation(
        frame_id="f",
        width_px=640,
        height_px=400,
        screen_width_px=1280,
        screen_height_px=800,
        capture_time=datetime(2026, 1, 2, tzinfo=UTC),
        image_id="i",
    )
    return replace(made, **more)  # type: ignore[arg-type]


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (640, 400)).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_tree_is_in_the_models_units_and_omits_empty_elements() -> None:
    assert prompts.tree_lines(SHOWN, SPACE, max_chars=1000).splitlines() == RENDERED
    assert prompts.boxes_of(SHOWN) == ((60, 70, 40, 20), (100, 100, 200, 100))


def test_a_tree_is_cut_at_the_end_of_a_line_and_counts_the_missing_elements() -> None:
    fits = len("\n".join(RENDERED))
    assert prompts.tree_lines(SHOWN, SPACE, max_chars=fits).splitlines() == RENDERED
    assert prompts.tree_lines(SHOWN, SPACE, max_chars=fits - 1).splitlines() == [*RENDERED[:2], "(1 more)"]
    assert prompts.tree_lines(SHOWN, SPACE, max_chars=1000, left_out_count=7).splitlines() == [*RENDERED, "(7 more)"]
    assert prompts.tree_lines(SHOWN, SPACE, max_chars=10, left_out_count=7) == "(10 more)"


@given(st.integers(1, 400), st.integers(0, 3))
def test_no_tree_exceeds_its_limit(max_chars: int, left_out_count: int) -> None:
    text = prompts.tree_lines(SHOWN * 3, SPACE, max_chars=max_chars, left_out_count=left_out_count)
    assert len(text) <= max(max_chars, len("(12 more)"))


def test_an_observation_has_the_parts_that_the_settings_request() -> None:
    settings = AgentSettings(a11y_tree=True, terminal=True, terminal_chars=4, a11y_chars=1000)
    seen = prompts.model_observation(
        observation(data=png(), a11y_elements=SHOWN, terminal="$ ls\nfile"), SPACE, settings
    )
    assert seen.image is not None
    assert seen.terminal == "file"
    message = prompts.observation_message("Done.", seen)
    assert message.parts[0] is seen.image
    assert message.parts[1:] == (
        "Done.\n\nElements on the screen, with the middle of each:\n" + "\n".join(RENDERED) + "\n\nTerminal:\nfile",
    )


def test_a_text_only_agent_gets_no_image() -> None:
    settings = AgentSettings(text_only=True, a11y_tree=True)
    seen = prompts.model_observation(observation(a11y_elements=SHOWN), SPACE, settings)
    assert seen.image is None
    assert all(isinstance(part, str) for part in prompts.task_message("Do it.", seen, settings).parts)


def test_the_system_message_describes_observations_and_actions() -> None:
    settings = AgentSettings(terminal=True, max_turns=7)
    (text,) = prompts.system_message(settings, Picture(1001, 1001)).parts
    assert isinstance(text, str)
    assert "a screenshot and the text of the terminal" in text
    assert "You have 7 replies" in text
    assert "<tools>" in text
    assert "x from 0 to 1000" in text


def test_the_result_of_a_reply_is_one_sentence() -> None:
    assert prompts.result_text() == "Done."
    assert prompts.result_text(errors=("", "no such key")) == "That did not work: no such key"
    assert prompts.result_text(mistake="no call") == "Nothing was done: no call"
    assert "cut off at 512 tokens" in prompts.result_text(mistake="no call", cut_off_at=512)
    assert len(prompts.result_text(mistake="x" * 5000)) < 300


def test_observations_are_equal_if_pixels_and_texts_are() -> None:
    seen = prompts.model_observation(observation(data=png()), SPACE, AgentSettings())
    assert seen.is_same_as(replace(seen, image=None))
    assert not seen.is_same_as(replace(seen, image_id="j"))
    assert not seen.is_same_as(replace(seen, terminal="$"))


def test_only_equal_settings_have_equal_prompt_hashes() -> None:
    digest = prompts.prompt_hash(AgentSettings())
    assert digest == prompts.prompt_hash(AgentSettings.from_mapping({}))
    assert len(digest) == 64
    others = [
        AgentSettings(grammar="tags"),
        AgentSettings(terminal=True, max_turns=10),
        AgentSettings(fallbacks=("wait_word",)),
    ]
    assert len({digest, *(prompts.prompt_hash(settings) for settings in others)}) == 4


@pytest.mark.parametrize(
    "token",
    [
        "<|im_end|>",
        "<|vision_start|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "</s>",
        "<image>",
        "<start_of_turn>",
        "[/INST]",
        "[IMG]",
    ],
)
def test_no_text_of_a_message_spells_a_control_token(token: str) -> None:
    seen = prompts.model_observation(
        observation(data=png(), terminal=f"x{token}"), SPACE, AgentSettings(terminal=True, max_turns=5)
    )
    messages = [
        prompts.task_message(f"Type {token}", seen, AgentSettings()),
        prompts.observation_message(prompts.result_text(errors=(f"no key {token}",)), seen),
        Message("assistant", (f"type({token!r})",)),
        Message("user", (token[:3], token[3:])),
    ]
    texts = [part for message in messages for part in message.parts if isinstance(part, str)]
    assert len(texts) == 4
    assert all(f"{token[0]} {token[1:]}" in text and token not in text for text in texts)


def test_ordinary_text_is_sent_as_it_is() -> None:
    text = "if (a<|b) { x[0] |> f } <b>bold</b> <tool_call>{}</tool_call> <think></think> a<|very long\ntext|>"
    assert Message("user", (text,)).parts == (text,)
