"""Play oracles through the service and record the conversations that a model would have had.

An oracle replaces the model in the agent's own loop, so prompts and screenshots are those of training. The grammar's
`render` writes its replies, so they parse by construction.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from cuaenv.client import Action, Done, Fail, Task, Wait
from trainer.agent.attempts import Environments, play_task
from trainer.agent.coordinates import CoordinateSpace, to_model_points
from trainer.agent.grammars import UnsupportedAction, split_actions
from trainer.agent.prompts import prompt_hash
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message, ModelFailed, Outcome, Reply
from trainer.data.oracles import Oracle
from trainer.data.prompts import task_metadata
from trainer.data.transcripts import Unusable, with_message
from trainer.replay.trajectory import StoredTrajectory

#: Successive waits, in seconds, while an input has not changed the screen: an emulated guest may take 30 s to open a
#: window, and the next keys would go to the wrong one.
PATIENCE_S = (1.0, 2.0, 4.0, 8.0, 15.0)
#: After a step with a condition the screen must not change during one of these waits.
_STILL_S = (8.0, 8.0, 8.0)


async def record(
    environments: Environments,
    task: Task,
    oracle: Oracle,
    *,
    settings: AgentSettings,
    screen_px: tuple[int, int] = (1280, 800),
    pool: str = "",
    patience_s: Sequence[float] = PATIENCE_S,
    must_succeed: bool = True,
) -> list[StoredTrajectory]:
    """Play an oracle and return its conversation: a trajectory per context, named `_chunkN` if there are several.

    Untrained (`step_loss_mask` 0) are turns that only wait for the screen, and in later contexts the turns of earlier
    ones, which were sampled with more screenshots.

    Args:
        task: The oracle's task, or the template of it.
        screen_px: Size of the guest's screen (width, height) that the oracle's points refer to.
        patience_s: Successive waits for a change of the screen; empty for desktops that respond immediately.
        must_succeed: Whether a score below 1 is an error.

    Raises:
        Unusable: It scored less than 1 although it must succeed, was lost, or the grammar cannot express it.
    """
    conversations: list[OracleConversation] = []

    def new_conversation() -> OracleConversation:
        conversations.append(OracleConversation(oracle, settings, screen_px=screen_px, patience_s=patience_s))
        return conversations[-1]

    task_id = oracle.task_id
    trajectory = await play_task(environments, task_id, new_conversation, settings=settings, pool=pool)
    if trajectory.evaluation is None or trajectory.outcome not in (Outcome.TERMINATED, Outcome.TRUNCATED):
        raise Unusable(f"{task_id}: {trajectory.reason}: {trajectory.error}")
    if must_succeed and trajectory.evaluation.score < 1.0:
        mistakes = [error for turn in trajectory.turns for error in turn.facts.errors]
        raise Unusable(
            f"{task_id}: the oracle scored {trajectory.evaluation.score:g} in {len(trajectory.turns)} turns"
            f" ({trajectory.reason}); mistakes: {'; '.join(mistakes) or 'none'}"
        )
    metadata = {
        "instruction": trajectory.instruction,
        **task_metadata(task),
        "source": "oracle",
        "grammar": settings.grammar,
        "prompt_hash": prompt_hash(settings),
    }
    contexts = conversations[-1].contexts
    return [
        replace(
            context,
            task_id=task_id if len(contexts) == 1 else f"{task_id}_chunk{number}",
            reward=trajectory.evaluation.score,
            metadata=metadata,
        )
        for number, context in enumerate(contexts)
    ]


class OracleConversation:
    """Renders an oracle's actions as replies; a `trainer.agent.types.Conversation`."""

    def __init__(
        self,
        oracle: Oracle,
        settings: AgentSettings,
        *,
        screen_px: tuple[int, int],
        patience_s: Sequence[float] = PATIENCE_S,
    ) -> None:
        """See `record` for the arguments."""
        self._task_id = oracle.task_id
        self._steps = [(step, index in oracle.slow_steps) for index, step in enumerate(oracle.steps)]
        self._settings = settings
        self._grammar = settings.make_grammar()
        self._screen_px = screen_px
        self._patience_s = patience_s
        self._waits: list[float] = []
        self._still_waits: list[float] = []
        self._is_waiting = False
        self._screen: object = None
        self._has_changed = True
        self._image_px = screen_px
        self.contexts: list[StoredTrajectory] = []
        """The messages so far."""

    async def begin(self, messages: Sequence[Message]) -> None:
        self.contexts.append(StoredTrajectory(task_id=self._task_id, messages=()))
        self._image_px = self._screen_px
        for message in messages:
            self._add(message)
        self._observe(messages[-1])

    async def append(self, message: Message) -> None:
        self._add(message)
        self._observe(message)

    async def generate(self) -> Reply:
        """Return the next step, or a wait if the last one has not changed the screen yet or may still change it.

        Raises:
            ModelFailed: The steps are used up, or the grammar cannot express the step.
        """
        if self._waits and not self._has_changed:
            return self._reply((Wait(timedelta(seconds=self._waits.pop(0))),), is_trained=False)
        self._waits = []
        if self._still_waits and (self._has_changed or not self._is_waiting):
            self._is_waiting = True
            return self._reply((Wait(timedelta(seconds=self._still_waits.pop(0))),), is_trained=False)
        if not self._steps:
            raise ModelFailed("the oracle has no more steps and did not end with done")
        actions, is_slow = self._steps[0]
        if not self._can_render(actions):
            # Split the step for grammars with one action per reply, or with simpler actions.
            parts = [part for action in actions for part in split_actions(action)]
            self._steps[:1] = [((part,), is_slow and part is parts[-1]) for part in parts]
        actions, is_slow = self._steps.pop(0)
        is_input = not all(isinstance(action, Wait | Done | Fail) for action in actions)
        self._waits = list(self._patience_s) if is_input else []
        self._still_waits, self._is_waiting = list(_STILL_S) if is_slow and self._patience_s else [], False
        return self._reply(actions, is_trained=True)

    def _add(self, message: Message) -> None:
        self.contexts[-1] = with_message(self.contexts[-1], message)
        sizes = [part.size for part in message.parts if not isinstance(part, str)]
        self._image_px = sizes[-1] if sizes else self._image_px

    def _observe(self, message: Message) -> None:
        images = [part.tobytes() for part in message.parts if not isinstance(part, str)]
        # A message without an image means an unchanged screen, except for text-only agents, which compare the text.
        screen = images or (message.parts if self._settings.text_only else self._screen)
        self._has_changed, self._screen = screen != self._screen, screen

    def _reply(self, actions: Sequence[Action], *, is_trained: bool) -> Reply:
        try:
            text = self._render(actions)
        except UnsupportedAction as error:
            raise ModelFailed(f"{self._settings.grammar}: {error}") from error
        self.contexts[-1] = with_message(self.contexts[-1], Message("assistant", (text,)), trained=is_trained)
        return Reply(text=text)

    def _can_render(self, actions: Sequence[Action]) -> bool:
        try:
            self._render(actions)
        except UnsupportedAction:
            return False
        return True

    def _render(self, actions: Sequence[Action]) -> str:
        space = CoordinateSpace.of(self._settings.units, image_px=self._image_px, screen_px=self._screen_px)
        return self._grammar.render([to_model_points(action, space) for action in actions])
