"""Desktops as a Gymnasium environment: `gymnasium.make("trainer.adapters.gymnasium:envd/Desktop-v0", task=...)`.

An observation is the screenshot. An action is an element of the Dict space, of which each kind of action reads its own
fields, or a JSON form of `trainer.adapters.actions`. The reward is 0 until the episode ends, and then the task's score.

A void episode is truncated: `info["void"]` has the reason. Its reward is NaN, because Gymnasium has no "not scored".
"""

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, get_args

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import InvalidAction, ResetNeeded

from cuaenv.action_codec import SCREEN_FORMS
from cuaenv.client import Button, EpisodeEnded, StepResult, View
from trainer.adapters.actions import read_actions
from trainer.adapters.background import blocking
from trainer.adapters.session import Session, SessionSettings, SessionVoid, open_session

ENV_ID = "envd/Desktop-v0"
MODIFIERS = ("ctrl", "alt", "shift", "win")
#: Keys of `press`, `key_down` and `key_up`, by their number in the action space.
KEYS = (
    *("enter", "tab", "esc", "backspace", "delete", "insert", "space", "home", "end", "pageup", "pagedown"),
    *("up", "down", "left", "right", *MODIFIERS),
    *(f"f{number}" for number in range(1, 13)),
    *string.ascii_lowercase,
    *string.digits,
    *"`-=[]\\;',./",
)
#: Kinds of actions, by their number in the action space, and their fields.
KINDS: Mapping[str, Sequence[str]] = {name: tuple(form.fields) for name, form in SCREEN_FORMS.items()}
_BUTTONS = get_args(Button)

Screen = npt.NDArray[np.uint8]


class DesktopEnv(gymnasium.Env[Screen, Mapping[str, Any]]):
    """One desktop; each reset is an episode on a machine of its own."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012 -- Gymnasium's own attribute

    def __init__(
        self,
        task: str | Sequence[str],
        *,
        envd: str = "",
        size: tuple[int, int] = (1280, 800),
        render_mode: str | None = None,
        void_reward: float = math.nan,
        **options: Any,
    ) -> None:
        """Prepare; the first reset connects.

        Args:
            task: Id of the task, or several, of which each reset draws one.
            envd: `HOST:PORT`; by default the variable `ENVD_TARGET`, or else this host.
            size: Width and height of observations; a larger screen is scaled down.
            render_mode: `rgb_array` or None.
            void_reward: Reward of a void episode's last step.
            options: As for `SessionSettings.connect`, such as `max_steps`, `pool` or `group_size`.

        Raises:
            ValueError: An option is out of range.
        """
        self._tasks = (task,) if isinstance(task, str) else tuple(task)
        if not self._tasks:
            raise ValueError("task is empty; name at least one")
        self.render_mode = render_mode
        self._void_reward = void_reward
        width, height = size
        view = View(max_width_px=width, max_height_px=height)
        self._settings = SessionSettings.connect(envd, view=view, **options)
        self._session: Session | None = None
        self.observation_space = spaces.Box(0, 255, (height, width, 3), np.uint8)
        x, y, wheel = spaces.Discrete(width), spaces.Discrete(height), spaces.Discrete(21, start=-10)
        text = spaces.Text(256, min_length=0, charset=string.ascii_letters + string.digits + string.punctuation + " \n")
        self.action_space = spaces.Dict(
            {
                "action": spaces.Discrete(len(KINDS)),
                "x": x,
                "y": y,
                "to_x": spaces.Discrete(width),
                "to_y": spaces.Discrete(height),
                "button": spaces.Discrete(len(_BUTTONS)),
                "count": spaces.Discrete(3, start=1),
                "dx": wheel,
                "dy": spaces.Discrete(21, start=-10),
                "modifiers": spaces.MultiBinary(len(MODIFIERS)),
                "key": spaces.Discrete(len(KEYS)),
                "text": text,
                "seconds": spaces.Discrete(10, start=1),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Screen, dict[str, Any]]:
        """Open an episode, after closing the previous one; `options["task"]` overrides the task.

        Raises:
            EnvError: It could not be opened.
            ValueError: The screen does not have the size of the observation space.
        """
        super().reset(seed=seed)
        self._release()
        drawn = self._tasks[int(self.np_random.integers(len(self._tasks)))]
        session = blocking(open_session((options or {}).get("task", drawn), settings=self._settings))
        self._session = session
        return self._screen(session), {"task": session.episode.task_id, "instruction": session.instruction}

    def step(self, action: Mapping[str, Any]) -> tuple[Screen, SupportsFloat, bool, bool, dict[str, Any]]:
        """Perform an action. The last step of an episode evaluates it.

        Raises:
            InvalidAction: The action is malformed; nothing was done.
            ResetNeeded: The episode has ended.
            EnvError: The daemon refused the request.
        """
        session = self._session
        if session is None or session.done:
            raise ResetNeeded("the episode has ended, or none was opened; call reset")
        try:
            actions = read_actions([form_of(action)])
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidAction(f"action: {error}") from error
        info: dict[str, Any] = {"errors": "", "void": ""}
        try:
            result: StepResult = blocking(session.step(*actions))
        except EpisodeEnded as error:
            raise ResetNeeded(str(error)) from error
        except SessionVoid:
            info["void"] = session.void
            return self._screen(session), self._void_reward, False, True, info
        info["errors"] = result.action_errors[0]
        if not result.done:
            return self._screen(session), 0.0, False, False, info
        score = blocking(session.score())
        info |= {"end_reason": result.end_reason, "guest_end_cause": score.guest_end_cause, "void": score.void}
        if score.reward is None:
            return self._screen(session), self._void_reward, False, True, info
        return self._screen(session), score.reward, not session.truncated, session.truncated, info

    def render(self) -> Any:
        """Return the latest screen in the mode `rgb_array`, else None."""
        return self._screen(self._session) if self.render_mode == "rgb_array" and self._session is not None else None

    def close(self) -> None:
        """Release the machine. Idempotent."""
        self._release()

    def _release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            blocking(session.close())

    def _screen(self, session: Session) -> Screen:
        screen = session.observation.rgb_HWC
        if screen.shape != self.observation_space.shape:
            self._release()
            size = f"{screen.shape[1]}x{screen.shape[0]}"
            raise ValueError(f"task {session.episode.task_id}: the screen is {size}; pass its size as `size`")
        # Callers may change it.
        return screen.copy()


def form_of(action: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form of an element of the action space; a JSON form is returned unchanged.

    Raises:
        LookupError, TypeError, ValueError: The action is neither.
    """
    if isinstance(action["action"], str):
        return dict(action)
    kind, fields = list(KINDS.items())[int(action["action"])]
    held = [name for name, is_held in zip(MODIFIERS, action["modifiers"], strict=True) if is_held]
    key = KEYS[int(action["key"])]
    words: dict[str, Any] = {
        "button": _BUTTONS[int(action["button"])],
        "modifiers": held,
        "keys": [*(name for name in held if name != key), key],
        "key": key,
        "text": str(action["text"]),
        "answer": str(action["text"]),
        "explanation": str(action["text"]),
    }
    given = {name: words[name] if name in words else int(action[name]) for name in fields if name in {*words, *action}}
    return {"action": kind, **given}


gymnasium.register(ENV_ID, entry_point=f"{__name__}:DesktopEnv")
