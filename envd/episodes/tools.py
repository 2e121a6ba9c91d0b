"""Use tools in an episode, if its task or its pool allows them. What is not allowed is the agent's mistake."""

from cuaenv.actions import AskUser, ToolAction
from envd.base.errors import UserUnavailable
from envd.episodes.episode import Episode
from envd.guest.observation import ActionOutcome
from envd.tasks.model import allowed_tools
from envd.tasks.user import Exchange
from envd.tasks.user_model import UserModel


async def use_tool(episode: Episode, action: ToolAction, *, user_model: UserModel | None) -> ActionOutcome:
    """Use a tool on the episode's machine, or ask its user.

    Raises:
        UserUnavailable: The model that plays the user did not answer.
    """
    if action.needs not in allowed_tools(episode.task, episode.pool_tools):
        offered = ", ".join(episode.tools) or "none"
        return ActionOutcome(error=f"{action.needs} is not allowed in this episode; allowed tools: {offered}")
    if not isinstance(action, AskUser):
        return await episode.machine.desktop.use_tool(action)
    user = episode.task.user
    if user is None:
        return ActionOutcome(error="this task has no user to ask")
    if len(episode.asked) >= user.max_questions:
        return ActionOutcome(error=f"the user answers no more than {user.max_questions} questions")
    if not user.persona:
        answer = user.answer(action.question, episode.asked)
    elif user_model is None:
        raise UserUnavailable("the user's model: tasks.user_url is not set")
    else:
        answer = await user_model.answer(user.persona, action.question, episode.asked)
    episode.asked = (*episode.asked, Exchange(action.question, answer))
    return ActionOutcome(output=answer)
