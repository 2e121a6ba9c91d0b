"""Published agents, unmodified, play a task through the gateway; their rows have the ids that the engine sampled.

`GATEWAY_AGENTS` is a directory of checkouts: anthropics/anthropic-quickstarts, openai/openai-cua-sample-app and
xlang-ai/OSWorld, each in a directory of its repository's name.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.gateway.published import AGENTS
from tests.support.counting import AGENT, PARAMS, TASK
from tests.support.gateway import ToolTokenizer, tool_call
from tests.support.server import serve_fake
from tests.support.slime import Sample, ScriptedEngine, stand_in_args, stand_in_slime
from trainer.gateway.slime import generate
from trainer.slime.job import job_of
from trainer.slime.play.samples import facts_of, flatten

CHECKOUTS = Path(os.environ.get("GATEWAY_AGENTS", ""))
DRIVER = Path(__file__).parent / "published.py"
ROOT = Path(__file__).parents[3]
#: In pixels of the screen.
BUTTON = [819, 100]


def anthropic_clicks(*counts: int) -> list[str]:
    names = {1: "left_click", 2: "double_click", 3: "triple_click"}
    return [f"I click. {tool_call('computer', action=names[count], coordinate=BUTTON)}" for count in counts]


def openai_clicks(*counts: int) -> list[str]:
    kinds = {1: "click", 2: "double_click"}
    points = [{"type": kinds[count], "x": BUTTON[0], "y": BUTTON[1]} for count in counts]
    return [f"I click. {tool_call('computer', actions=[point])}" for point in points]


def osworld_clicks(*counts: int) -> list[str]:
    return [f"I click.\n```python\npyautogui.click(819, 100, clicks={count})\n```" for count in counts]


SAID = {
    "anthropic-quickstarts": [tool_call("computer", action="screenshot"), *anthropic_clicks(3, 2), "Done."],
    "openai-cua-sample-app": [
        tool_call("computer", actions=[{"type": "screenshot"}]),
        *openai_clicks(2, 2, 1),
        "Done.",
    ],
    "OSWorld": [*osworld_clicks(1, 1, 1, 2), "Done.\n```\nDONE\n```"],
}
#: Rows of an episode: OSWorld's agent leaves out what is older than two turns.
ROWS = {"anthropic-quickstarts": 1, "openai-cua-sample-app": 1, "OSWorld": 3}


@pytest.mark.parametrize("name", AGENTS)
async def test_a_published_agent_plays_a_task_and_its_rows_are_the_engines(name: str, tmp_path: Path) -> None:
    checkout = CHECKOUTS / name
    if not os.environ.get("GATEWAY_AGENTS") or not checkout.is_dir():
        pytest.skip(f"no checkout of {name}; set GATEWAY_AGENTS to a directory of checkouts, see docs/gateway.md")
    replies = iter(SAID[name])
    engine = ScriptedEngine(lambda _: next(replies))
    agent = {**AGENT, "max_turns": 12, "images_per_row": 12, "context_tokens": 131_072, "timeout_s": 300.0}
    async with serve_fake(size=2, capacity=4) as server:
        with stand_in_slime(engine) as state:
            state.tokenizer = ToolTokenizer()
            args = stand_in_args(
                {
                    "hosts": [server.address],
                    "engine_retries": 1,
                    "engine_timeout_s": 60.0,
                    "attempts": 1,
                    "agent": agent,
                },
                n_samples_per_prompt=1,
                harness={
                    "command": [sys.executable, str(DRIVER), name, str(checkout)],
                    "env": {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
                    "directory": str(tmp_path),
                },
            )
            # The probe of the engine takes a reply, so it is made before.
            engine.say, say = lambda _: "ok", engine.say
            sample = Sample(group_index=0, index=0, metadata={"task_id": TASK})
            await job_of(args).ready(args, sample, PARAMS, evaluation=False)
            engine.say = say
            engine.requests.clear()
            rows = flatten([await generate(args, sample, PARAMS)])
    assert [row.status.name for row in rows] == ["COMPLETED"] * ROWS[name], facts_of(rows[0])
    assert rows[0].reward == 1.0
    assert facts_of(rows[0])["parsed"] == facts_of(rows[0])["turns"] == len(SAID[name])
    trained = [token for row in rows for token in sampled(row)]
    assert trained == [token for text in SAID[name] for token in state.tokenizer.encode(f"{text}<|im_end|>")]


def sampled(row: Any) -> Sequence[int]:
    response = row.tokens[-row.response_length :]
    return [token for token, mask in zip(response, row.loss_mask or (), strict=True) if mask]
