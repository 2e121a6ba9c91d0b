"""Settings of an agent: unknown keys and impossible budgets are refused at start, and the error shows the sum."""

import dataclasses

import pytest

from trainer.agent.settings import AgentSettings, RowCost, text_tokens


def test_a_mapping_sets_values_of_every_kind() -> None:
    given = {
        "grammar": "tags",
        "fallbacks": ["bare_json", "wait_word"],
        "coordinates": "normalised",
        "max_turns": 8,
        "timeout_s": 60,
        "a11y_tree": True,
    }
    settings = AgentSettings.from_mapping(given)
    assert settings.fallbacks == ("bare_json", "wait_word")
    assert (settings.units, settings.timeout_s, settings.a11y_tree) == ("normalised", 60.0, True)
    assert AgentSettings.from_mapping(dataclasses.asdict(settings)) == settings


def test_an_unknown_key_is_refused_and_the_error_lists_the_known_keys() -> None:
    with pytest.raises(ValueError, match=r"^zzz: unknown key; .*known keys: grammar, .*context_tokens"):
        AgentSettings.from_mapping({"zzz": 512})
    with pytest.raises(ValueError, match=r"^max_turn: unknown key; did you mean max_turns\?"):
        AgentSettings.from_mapping({"max_turn": 512})


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("max_turns", "ten", "max_turns is 'ten'; it must be a valid integer"),
        ("max_turns", True, "max_turns is True; it must be a valid integer"),
        ("max_turns", 0, "max_turns is 0; it must be at least 1"),
        ("timeout_s", "1m", "timeout_s is '1m'; it must be a valid number"),
        ("timeout_s", float("nan"), "timeout_s is nan; it must be at least 1"),
        ("a11y_tree", 1, "a11y_tree is 1; it must be a valid boolean"),
        ("fallbacks", "bare_json", "fallbacks is 'bare_json'; it must be a valid array"),
        ("fallbacks", ["guess"], "unknown fallback guess"),
        ("grammar", "xml", "unknown grammar 'xml'"),
        ("grammar", 3, 'grammar is 3; it must be a text; write "3"'),
        ("coordinates", "metres", "coordinates is 'metres'"),
        ("text_only", True, "text_only shows nothing"),
    ],
)
def test_an_invalid_value_is_refused_and_the_error_names_its_key(key: str, value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        AgentSettings.from_mapping({key: value})


def test_keeping_more_screenshots_than_a_row_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="would keep 2 screenshots, but images_per_row is 1"):
        AgentSettings(images_per_row=1)
    with pytest.raises(ValueError, match="would keep 3 screenshots, but images_per_row is 2"):
        AgentSettings(images_per_row=2, first_image_kept=True)


def test_every_setting_has_a_description() -> None:
    with open(AgentSettings.__init__.__globals__["__file__"], encoding="utf-8") as source:
        lines = source.read().splitlines()
    for field in dataclasses.fields(AgentSettings):
        at = next(index for index, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
        assert lines[at + 1].startswith('    """'), field.name


# -- budgets ----------------------------------------------------------------------------------------------------


def test_no_screenshot_needs_more_tokens_than_its_budget() -> None:
    settings = AgentSettings()
    for width_px in range(320, 4000, 32):
        height_px = settings.image_max_pixels // width_px // 32 * 32
        assert (width_px // 32) * (height_px // 32) <= settings.image_tokens


def test_the_cost_is_the_sum_of_prompt_screenshots_and_turns() -> None:
    cost = RowCost(prompt=1000, images=3, image=900, tree=100, turns=10, reply=400, observation=50)
    assert cost.total == 1000 + 3 * 1000 + 10 * 450
    cost.check(cost.total)
    with pytest.raises(ValueError, match=r"1000 of prompt \+ 3 x .* = 8500 tokens, but context_tokens is 8499"):
        cost.check(8499)


def test_fewer_screenshots_per_row_lower_its_cost() -> None:
    settings = AgentSettings(context_tokens=12_288, max_turns=10, images_per_row=3)
    assert settings.row_cost.images == 3
    with pytest.raises(ValueError, match="an episode does not fit into its row"):
        AgentSettings(context_tokens=12_288, max_turns=10)


def test_a_text_only_agent_pays_for_no_screenshots() -> None:
    settings = AgentSettings(text_only=True, a11y_tree=True, a11y_chars=3000)
    assert (settings.row_cost.image, settings.row_cost.tree) == (0, text_tokens(3000))
    assert settings.view.encoding == "none"
