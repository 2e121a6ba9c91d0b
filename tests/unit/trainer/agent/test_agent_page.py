"""docs/agent.md and the settings of the agent in docs/train-settings.md agree with the code."""

import dataclasses
from pathlib import Path

import pytest

from trainer.agent.grammars import FALLBACKS, GRAMMARS, Picture, grammar
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Outcome

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "agent.md").read_text(encoding="utf-8")


def test_the_page_lists_every_name() -> None:
    names = [*GRAMMARS, *FALLBACKS, *(outcome.name for outcome in Outcome)]
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_the_page_lists_every_setting_with_its_default() -> None:
    page = (DOCS / "train-settings.md").read_text(encoding="utf-8").partition("## The agent")[2]
    for field in dataclasses.fields(AgentSettings):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{field.name}` |")]
        default = row.split("|")[2].strip()
        documented = {"true": True, "false": False, "[]": (), "the grammar's": None}.get(default, default)
        assert documented == field.default or float(default) == field.default, row


def test_the_page_shows_the_actual_budget_error() -> None:
    with pytest.raises(ValueError, match="does not fit") as refusal:
        AgentSettings(context_tokens=4096, max_turns=10)
    assert str(refusal.value) in PAGE.replace("\n", " ")


@pytest.mark.parametrize("name", ["qwen3-vl", "tags", "verbs"])
def test_the_replies_on_the_page_can_be_parsed(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |") and "actions" not in line]
    reply = row.split("|")[2].split("`")[1]
    assert grammar(name).parse(reply, Picture(1001, 1001)).parsed
