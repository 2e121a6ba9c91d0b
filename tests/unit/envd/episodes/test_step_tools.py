"""Tools within a step: what the episode allows, and questions to the task's user."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cuaenv.actions import AskUser, RunShell
from envd.base.errors import EvaluatorFailed, UserUnavailable
from envd.desktop.observation import ActionOutcome
from envd.episodes.progress import Progress
from envd.episodes.stepping import use_tool
from envd.tasks.checkers.base import judge_directly
from envd.tasks.model import Task, offered_tools
from envd.tasks.user import Exchange

FACTS = {"facts": [{"about": word, "answer": f"The {word}."} for word in ("room", "date")], "max_questions": 2}


def episode_of(user: dict[str, Any] | None = None, *, pool_tools: Sequence[str] = ()) -> Any:
    tools = ("ask_user",) if user else ()
    task = Task.model_validate(
        {"task_id": "suite/ask", "instruction": "Do it.", "level": 1, "infeasible": True, "tools": tools, "user": user}
    )
    return SimpleNamespace(
        task=task,
        pool_tools=tuple(pool_tools),
        tools=offered_tools(task, tuple(pool_tools)),  # type: ignore[arg-type]
        progress=Progress(),
        machine=SimpleNamespace(desktop=SimpleNamespace(use_tool=AsyncMock(return_value=ActionOutcome(output="ran")))),
    )


async def ask(episode: Any, question: str = "Which room?", **context: Any) -> ActionOutcome:
    parts: Any = SimpleNamespace(**{"judge": judge_directly, "user_model": None, **context})
    return await use_tool(episode, AskUser(question), context=parts)


async def test_questions_are_answered_and_noted_up_to_their_limit() -> None:
    episode = episode_of(FACTS)
    assert await ask(episode) == ActionOutcome(output="The room.")
    assert await ask(episode, "Who are you?") == ActionOutcome(output="I do not know.")
    assert await ask(episode) == ActionOutcome(error="the user answers no more than 2 questions")
    assert episode.progress.asked == (Exchange("Which room?", "The room."), Exchange("Who are you?", "I do not know."))


async def test_a_tool_that_is_not_allowed_is_the_agents_mistake() -> None:
    assert (await ask(episode_of())).error == "ask_user is not allowed in this episode; allowed tools: none"
    assert (await ask(episode_of(pool_tools=["ask_user"]))).error == "this task has no user to ask"
    shell: Any = SimpleNamespace()
    refused = await use_tool(episode_of(FACTS), RunShell("id"), context=shell)
    assert refused.error == "shell is not allowed in this episode; allowed tools: ask_user"
    assert await use_tool(episode_of(pool_tools=["shell"]), RunShell("id"), context=shell) == ActionOutcome(
        output="ran"
    )


async def test_a_persona_answers_by_the_model_that_the_host_has() -> None:
    episode, model = episode_of({"persona": "In a hurry."}), AsyncMock()
    with pytest.raises(UserUnavailable, match=r"tasks\.user_url is not set"):
        await ask(episode)
    model.answer.return_value = "Later!"
    assert await ask(episode, user_model=model) == ActionOutcome(output="Later!")
    model.answer.assert_awaited_once_with("In a hurry.", "Which room?", ())


async def test_a_host_that_matches_no_facts_has_no_user() -> None:
    judge = AsyncMock(side_effect=EvaluatorFailed("no worker"))
    with pytest.raises(UserUnavailable, match="the user's facts: no worker"):
        await ask(episode_of(FACTS), judge=judge)
