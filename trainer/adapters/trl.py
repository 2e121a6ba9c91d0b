"""Desktops for TRL: `GRPOTrainer(environment_factory=DesktopEnvironment)`.

TRL calls `reset` with a row of the dataset, offers the other public methods to the model as tools, and asks
`get_reward` once per rollout. Members of a group are rollouts of one row in one process: with `group_size` they start
on forks of one state.

Without `reward_funcs` of your own, a rollout that was lost to a fault of ours has the reward None: TRL leaves it out of
its group's baseline, and its advantage is 0. An exception in a tool is text for the model, so such a fault is
remembered until `get_reward`. See docs/adapters.md.
"""

import logging
from typing import Any

from cuaenv.client import EnvError
from trainer.adapters.actions import read_actions
from trainer.adapters.background import blocking
from trainer.adapters.session import TASK_COLUMN, Session, SessionSettings, SessionVoid, open_session
from trainer.agent.ownership import is_fault
from trainer.agent.types import without_control_tokens

logger = logging.getLogger(__name__)

#: Text and pictures in TRL's form.
Blocks = list[dict[str, Any]]


class DesktopEnvironment:
    """A desktop. Every public method except `reset` and `get_reward` is a tool, and its docstring is the model's."""

    def __init__(self, settings: SessionSettings | None = None, *, task: str = "") -> None:
        """Create an environment without a desktop; `reset` opens one.

        Args:
            settings: Where and how, bound with `functools.partial`; by default the daemon and token of the variables
                `ENVD_TARGET` and `ENVD_TOKEN`.
            task: Task of rows without a column `task_id`.
        """
        self._settings = settings or SessionSettings.connect()
        self._task = {TASK_COLUMN: task} if task else {}
        self._session: Session | None = None
        self._void = "the environment was not reset"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._session or self._void}>"

    def reset(self, **row: Any) -> Blocks:
        """Open the task of a row with the columns `task_id` and, optionally, `group`; return instruction and picture.

        On a fault of ours the rollout is void: it continues without a desktop and has no reward.

        Raises:
            EnvError: The request is wrong, for example its task or token; training stops.
            ValueError: The row has no task id.
        """
        if self._session is not None:
            blocking(self._session.close())
            self._session = None
        try:
            self._session = blocking(open_session(self._task | row, settings=self._settings))
        except EnvError as error:
            if not is_fault(error):
                raise
            self._void = f"{error.reason or type(error).__name__}: {error}"
            logger.warning("[envd] rollout is void: %s", self._void)
            return [{"type": "text", "text": "The desktop is unavailable."}]
        self._void = ""
        text = without_control_tokens(f"{self._session.instruction}\n")
        return [{"type": "text", "text": text}, *self._picture(self._session)]

    def get_reward(self) -> float | None:
        """Return the task's score, or None if the rollout is void; release the machine.

        Raises:
            EnvError: The daemon refused to score it, for example because the token lacks the right.
        """
        if self._session is not None:
            score = blocking(self._session.score())
            if score.value is not None:
                return score.reward
            self._void = score.void
        logger.warning("[envd] rollout without a reward: %s", self._void)
        return None

    def click(self, x: int, y: int, button: str = "left", count: int = 1) -> Blocks:
        """Click at a point of the latest screenshot.

        Args:
            x: Pixels from the left edge.
            y: Pixels from the top edge.
            button: left, middle or right.
            count: Number of clicks; 2 is a double click.
        """
        return self._act(action="click", x=x, y=y, button=button, count=count)

    def move(self, x: int, y: int) -> Blocks:
        """Move the pointer to a point of the latest screenshot.

        Args:
            x: Pixels from the left edge.
            y: Pixels from the top edge.
        """
        return self._act(action="move", x=x, y=y)

    def drag(self, x: int, y: int, to_x: int, to_y: int) -> Blocks:
        """Press the left button at (x, y), move to (to_x, to_y), and release it.

        Args:
            x: Start, in pixels from the left edge.
            y: Start, in pixels from the top edge.
            to_x: End, in pixels from the left edge.
            to_y: End, in pixels from the top edge.
        """
        return self._act(action="drag", x=x, y=y, to_x=to_x, to_y=to_y)

    def scroll(self, x: int, y: int, dy: int, dx: int = 0) -> Blocks:
        """Turn the mouse wheel at a point of the latest screenshot.

        Args:
            x: Pixels from the left edge.
            y: Pixels from the top edge.
            dy: Wheel clicks; positive values scroll down.
            dx: Wheel clicks; positive values scroll right.
        """
        return self._act(action="scroll", x=x, y=y, dy=dy, dx=dx)

    def type_text(self, text: str) -> Blocks:
        """Type text into the focused widget.

        Args:
            text: The text; a newline presses Enter.
        """
        return self._act(action="type", text=text)

    def press_keys(self, keys: list[str]) -> Blocks:
        """Press a key or a chord.

        Args:
            keys: Names of the keys, such as ["ctrl", "s"].
        """
        return self._act(action="press", keys=keys)

    def wait(self, seconds: float) -> Blocks:
        """Wait while the desktop runs.

        Args:
            seconds: Duration, at most 60.
        """
        return self._act(action="wait", seconds=seconds)

    def done(self, answer: str = "") -> Blocks:
        """End the task because it is done.

        Args:
            answer: Answer to the task's question, if it has one.
        """
        return self._act(action="done", answer=answer)

    def fail(self, explanation: str) -> Blocks:
        """End the task because it cannot be done.

        Args:
            explanation: The reason.
        """
        return self._act(action="fail", explanation=explanation)

    def _act(self, **action: Any) -> Blocks:
        if self._session is None:
            raise SessionVoid("the desktop is unavailable")
        one = self._session
        result = blocking(one.step(*read_actions([action])))
        text = without_control_tokens(" ".join(result.errors))
        if not result.done:
            return [*self._picture(one), *([{"type": "text", "text": text}] if text else [])]
        # Scored at once: the machine is free while other rollouts of the batch continue.
        blocking(one.score())
        return [{"type": "text", "text": text or "The task has ended."}]

    @staticmethod
    def _picture(one: Session) -> Blocks:
        return [{"type": "image", "image": one.screenshot}]
