"""Drive a published agent, unmodified, on the episode that the environment names: `published.py NAME CHECKOUT`.

Each agent gets a desktop in the place of its own computer. Agents whose API's address is fixed in their code reach the
gateway because requests to that address are sent there.
"""

import asyncio
import base64
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from cuaenv.client import Action, Click, EnvClient, Episode
from trainer.agent.grammars import Picture, grammar

_ADDRESS = re.compile(r"https://api\.openai\.com/v1")


def png_of(episode: Episode) -> bytes:
    buffer = io.BytesIO()
    episode.observation.image.save(buffer, "PNG")
    return buffer.getvalue()


def redirect_requests() -> None:
    import requests

    post = requests.post
    requests.post = lambda url, **options: post(_ADDRESS.sub(os.environ["OPENAI_BASE_URL"], url), **options)


def run_anthropic_demo(checkout: Path, episode: Episode) -> None:
    sys.path.insert(0, str(checkout / "computer-use-demo"))
    from computer_use_demo import loop
    from computer_use_demo.tools import groups
    from computer_use_demo.tools.base import BaseAnthropicTool, ToolResult

    class Desktop(BaseAnthropicTool):  # type: ignore[misc]
        name = "computer"

        def to_params(self) -> Any:
            size = {"display_width_px": 1280, "display_height_px": 800, "display_number": None}
            return {"name": self.name, "type": "computer_20250124", **size}

        async def __call__(self, *, action: str, coordinate: tuple[int, int] | None = None, **_: Any) -> Any:
            if action.endswith("click") and coordinate is not None:
                episode.step(Click(*coordinate, count={"left_click": 1, "double_click": 2, "triple_click": 3}[action]))
            return ToolResult(output=f"{action} done", base64_image=base64.b64encode(png_of(episode)).decode())

    version = "computer_use_20250124"
    groups.TOOL_GROUPS_BY_VERSION[version] = groups.ToolGroup(version=version, tools=[Desktop], beta_flag=None)

    def check(_request: Any, _response: Any, error: Exception | None) -> None:
        if error is not None:
            raise error

    asyncio.run(
        loop.sampling_loop(
            model="policy",
            provider=loop.APIProvider.ANTHROPIC,
            system_prompt_suffix="",
            messages=[{"role": "user", "content": [{"type": "text", "text": os.environ["ENVD_INSTRUCTION"]}]}],
            output_callback=print,
            tool_output_callback=lambda result, _: print(result.output),
            api_response_callback=check,
            api_key=os.environ["ANTHROPIC_API_KEY"],
            only_n_most_recent_images=3,
            tool_version=version,
        )
    )


def run_openai_cua(checkout: Path, episode: Episode) -> None:
    for name in ("playwright", "playwright.sync_api", "browserbase", "scrapybara"):
        sys.modules.setdefault(name, MagicMock())
    sys.path.insert(0, str(checkout))
    redirect_requests()
    from agent.agent import Agent

    class Desktop:
        environment = "linux"
        dimensions = (1280, 800)

        def screenshot(self) -> str:
            return base64.b64encode(png_of(episode)).decode()

        def click(self, x: int, y: int, button: str = "left") -> None:
            episode.step(Click(x, y))

        def double_click(self, x: int, y: int) -> None:
            episode.step(Click(x, y, count=2))

    agent = Agent(model="computer-use-preview", computer=Desktop())
    agent.run_full_turn([{"role": "user", "content": os.environ["ENVD_INSTRUCTION"]}], debug=False)


def run_osworld(checkout: Path, episode: Episode) -> None:
    sys.path.insert(0, str(checkout))
    redirect_requests()
    from mm_agents.agent import PromptAgent

    agent = PromptAgent(
        model="gpt-4o", action_space="pyautogui", observation_type="screenshot", max_trajectory_length=2
    )
    picture, done = Picture(1280, 800), False
    while not done:
        _, actions = agent.predict(os.environ["ENVD_INSTRUCTION"], {"screenshot": png_of(episode)})
        for code in actions:
            if code in ("DONE", "FAIL"):
                done = True
                continue
            parsed: tuple[Action, ...] = grammar("code").parse(f"```python\n{code}\n```", picture).actions
            episode.step(*parsed)


AGENTS = {"anthropic-quickstarts": run_anthropic_demo, "openai-cua-sample-app": run_openai_cua, "OSWorld": run_osworld}

if __name__ == "__main__":
    with EnvClient(os.environ["ENVD_TARGET"]) as client:
        AGENTS[sys.argv[1]](Path(sys.argv[2]), client.attach(os.environ["ENVD_EPISODE"], keep_open=True))
