"""Ends of an episode that the agent does not decide: their outcome, what is recorded, and whether it is evaluated."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from cuaenv.client import (
    Action,
    BadRequest,
    Evaluation,
    EvaluatorFailed,
    MachineLost,
    Observation,
    Origin,
    SampleVoid,
    State,
    StepResult,
    View,
)
from trainer.agent.loop import play_episode
from trainer.agent.settings import AgentSettings
from trainer.agent.types import BudgetExhausted, GenerationAborted, Message, ModelFailed, Outcome, Reply, Trajectory

SETTINGS = AgentSettings(max_turns=3, text_only=True, terminal=True, timeout_s=30)
WAIT = '<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": 1}}</tool_call>'


def observation() -> Observation:
    return Observation(
        frame_id="f",
        width_px=640,
        height_px=480,
        screen_width_px=640,
        screen_height_px=480,
        capture_time=datetime(2026, 1, 2, tzinfo=UTC),
        terminal="$",
    )


class Desktop:
    """A test double of the service: the test chooses the results of steps and of the evaluation."""

    def __init__(
        self, *, state: State = State.ACTIVE, stepping: asyncio.Event | None = None, error: Exception | None = None
    ) -> None:
        self.episode_id, self.task_id, self.instruction = "e1", "t1", "Do it."
        self.observation = observation()
        self.origin = Origin(template_digest="t", overlay_parent="o", first_frame_id="f")
        self.tools: tuple[str, ...] = ()
        self.step_count = self.evaluate_count = 0
        self.evaluation_error: Exception | None = None
        self.errors: tuple[str, ...] = ()
        self._state, self._stepping, self._error = state, stepping, error

    async def step(
        self, *actions: Action, view: View | None = None, timeout: timedelta = timedelta(minutes=3)
    ) -> StepResult:
        self.step_count += 1
        if self._stepping is not None:
            await self._stepping.wait()
        if self._error is not None:
            raise self._error
        return StepResult(
            observation=observation(),
            action_errors=self.errors or ("",) * len(actions),
            state=self._state,
            end_reason="" if self._state is State.ACTIVE else "MACHINE_LOST",
            step_count=self.step_count,
            timings_ms={},
            screen_change=None,
            replayed=False,
        )

    async def evaluate(self, *, timeout: timedelta = timedelta(minutes=5)) -> Evaluation:
        self.evaluate_count += 1
        if self.evaluation_error is not None:
            raise self.evaluation_error
        return Evaluation(score=0.5, checks=(), timings_ms={})

    async def close(self) -> None:
        """Do nothing: the caller of the loop closes episodes."""


class Model:
    """Replies with a wait, and raises at a chosen call."""

    def __init__(
        self, *, at: str = "", count: int = 1, error: BaseException | None = None, never_replies: bool = False
    ) -> None:
        self._at, self._count, self._error = at, count, error
        self._never_replies = never_replies

    def _maybe_raise(self, where: str) -> None:
        if where == self._at:
            self._count -= 1
            if self._count == 0 and self._error is not None:
                raise self._error

    async def begin(self, messages: Sequence[Message]) -> None:
        self._maybe_raise("begin")

    async def append(self, message: Message) -> None:
        self._maybe_raise("append")

    async def generate(self) -> Reply:
        self._maybe_raise("generate")
        if self._never_replies:
            await asyncio.Event().wait()
        return Reply(text=WAIT, token_ids=(1, 2, 3), log_probs=(-0.1,) * 3)


async def run(desktop: Desktop, model: Model, settings: AgentSettings = SETTINGS) -> Trajectory:
    return await play_episode(desktop, model, settings=settings)


async def test_an_episode_on_a_lost_machine_fails_and_is_not_evaluated() -> None:
    lost = MachineLost("killed", reason="MACHINE_LOST")
    desktop = Desktop(error=lost)
    trajectory = await run(desktop, Model())
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "MachineLost")
    assert trajectory.error is lost
    assert trajectory.evaluation is None
    assert desktop.evaluate_count == 0
    with pytest.raises(ValueError, match="no reward"):
        trajectory.facts(max_turns=3, metadata={})


async def test_the_reply_before_a_failure_is_recorded() -> None:
    trajectory = await run(Desktop(error=MachineLost("killed")), Model())
    (turn,) = trajectory.turns
    assert turn.reply.token_ids == (1, 2, 3)
    assert turn.facts.token_count == 3
    assert not turn.facts.actions[0].executed
    assert len(turn.actions) == 1


async def test_an_action_that_the_service_refuses_is_a_mistake_and_other_refusals_void_the_episode() -> None:
    refused = BadRequest("actions[0].wait.duration: 61 s is outside (0 s, 60 s]", field="actions[0].wait.duration")
    trajectory = await run(Desktop(error=refused), Model())
    assert (trajectory.outcome, trajectory.reason) == (Outcome.TRUNCATED, "turns")
    assert "61 s is outside" in trajectory.turns[0].facts.errors[0]
    other = BadRequest("observation.region: is not within the screen", field="observation.region")
    assert (await run(Desktop(error=other), Model())).outcome is Outcome.FAILED


async def test_an_episode_that_the_service_reports_as_failed_is_void() -> None:
    trajectory = await run(Desktop(state=State.FAILED), Model())
    assert trajectory.outcome is Outcome.FAILED
    assert isinstance(trajectory.error, SampleVoid)
    assert trajectory.error.reason == "MACHINE_LOST"


async def test_a_broken_checker_fails_the_episode_without_a_score() -> None:
    desktop = Desktop()
    desktop.evaluation_error = EvaluatorFailed("a checker broke")
    trajectory = await run(desktop, Model())
    assert (trajectory.outcome, trajectory.reason, trajectory.evaluation) == (Outcome.FAILED, "EvaluatorFailed", None)
    assert desktop.evaluate_count == 1
    assert len(trajectory.turns) == 3


@pytest.mark.parametrize("where", ["begin", "generate", "append"])
async def test_an_engine_failure_voids_the_episode(where: str) -> None:
    desktop = Desktop()
    trajectory = await run(desktop, Model(at=where, error=ModelFailed("no answer")))
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "ModelFailed")
    assert desktop.evaluate_count == 0


@pytest.mark.parametrize("where", ["begin", "generate", "append"])
async def test_an_aborted_episode_is_not_evaluated(where: str) -> None:
    desktop = Desktop()
    trajectory = await run(desktop, Model(at=where, error=GenerationAborted()))
    assert (trajectory.outcome, trajectory.error) == (Outcome.ABORTED, None)
    assert desktop.evaluate_count == 0


@pytest.mark.parametrize("where", ["begin", "generate"])
async def test_a_budget_exhausted_before_the_first_reply_voids_the_episode(where: str) -> None:
    desktop = Desktop()
    end = BudgetExhausted("the context is full", budget="total")
    trajectory = await run(desktop, Model(at=where, error=end))
    assert (trajectory.outcome, trajectory.reason, trajectory.turns) == (Outcome.FAILED, "no_reply_total", ())
    assert "the context is full; raise context_tokens" in str(trajectory.error)
    assert desktop.evaluate_count == 0


async def test_a_timeout_before_the_first_reply_voids_the_episode() -> None:
    desktop = Desktop()
    settings = AgentSettings(max_turns=3, text_only=True, terminal=True, timeout_s=1)
    trajectory = await run(desktop, Model(never_replies=True), settings)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "no_reply_time")
    assert desktop.evaluate_count == 0


@pytest.mark.parametrize(("where", "turn_count"), [("generate", 1), ("append", 2)])
async def test_an_exhausted_budget_truncates_and_the_state_is_evaluated_once(where: str, turn_count: int) -> None:
    desktop = Desktop()
    end = BudgetExhausted("the row is full", budget="total")
    trajectory = await run(desktop, Model(at=where, count=2, error=end))
    assert (trajectory.outcome, trajectory.reason, trajectory.error) == (Outcome.TRUNCATED, "total", None)
    assert len(trajectory.turns) == turn_count
    assert desktop.evaluate_count == 1
    facts = trajectory.facts(max_turns=3, metadata={"complexity": "low"})
    assert (facts.task_score, facts.truncated, len(facts.turns)) == (0.5, True, turn_count)


async def test_an_unexpected_error_voids_the_episode_and_is_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    error = ZeroDivisionError("a bug")
    trajectory = await run(Desktop(), Model(at="append", error=error))
    assert (trajectory.outcome, trajectory.error) == (Outcome.FAILED, error)
    assert "e1" in caplog.text


async def test_an_unrelated_timeout_error_does_not_truncate_the_episode() -> None:
    trajectory = await run(Desktop(error=TimeoutError("of something else")), Model())
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "TimeoutError")


async def test_a_timeout_during_a_step_truncates_and_the_reply_is_recorded() -> None:
    never = asyncio.Event()
    settings = AgentSettings(max_turns=3, text_only=True, terminal=True, timeout_s=1)
    desktop = Desktop(stepping=never)
    trajectory = await run(desktop, Model(), settings)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.TRUNCATED, "time")
    assert desktop.evaluate_count == 1
    (turn,) = trajectory.turns
    assert not turn.facts.actions[0].executed


async def test_cancellation_passes_through() -> None:
    never = asyncio.Event()
    desktop = Desktop(stepping=never)
    running = asyncio.create_task(run(desktop, Model()))
    async with asyncio.timeout(60):
        while not desktop.step_count:
            await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert desktop.evaluate_count == 0


async def test_the_last_turn_is_not_followed_by_an_observation() -> None:
    shown: list[str] = []

    class Watched(Model):
        async def append(self, message: Message) -> None:
            shown.append(message.role)

    desktop = Desktop()
    trajectory = await run(desktop, Watched())
    assert (trajectory.outcome, trajectory.reason) == (Outcome.TRUNCATED, "turns")
    assert (desktop.step_count, desktop.evaluate_count, len(shown)) == (3, 1, 2)


async def test_phases_are_timed() -> None:
    trajectory = await run(Desktop(), Model())
    assert set(trajectory.timings_s) == {"model", "step", "evaluate"}
    assert all(seconds >= 0 for seconds in trajectory.timings_s.values())


async def test_actions_without_a_result_were_not_performed() -> None:
    class Talkative(Model):
        async def generate(self) -> Reply:
            return Reply(text=WAIT * 3)

    desktop = Desktop()
    desktop.errors = ("", "no such key")
    trajectory = await run(desktop, Talkative())
    facts = trajectory.turns[0].facts
    assert [action.executed for action in facts.actions] == [True, False, False]
    assert facts.errors == ("no such key",)
