"""The table of owners: which ends of an episode are scored, void or repeated."""

import inspect
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from cuaenv import client
from cuaenv.client import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    EnvError,
    EpisodeEnded,
    EpisodeNotFound,
    EvaluatorFailed,
    GuestEnded,
    GuestFailed,
    LossUndecided,
    MachineLost,
    PoolExhausted,
    SampleVoid,
    SetupFailed,
    TaskNotFound,
    Unavailable,
    Unreachable,
    Wait,
)
from cuaenv.client.errors import error_of
from cuaenv.reasons import CODE_BY_REASON
from trainer.adapters.session import SessionSettings
from trainer.agent.ownership import Owner, failure_of, is_fault, reward_of, ruling_of, ruling_on
from trainer.agent.training import TrainingConfig
from trainer.agent.types import (
    BudgetExhausted,
    GenerationAborted,
    ModelFailed,
    NoReply,
    Outcome,
    PromptMismatch,
    Reply,
    Trajectory,
    Turn,
)
from trainer.rewards.facts import EpisodeFacts, TurnFacts
from trainer.rewards.recipes import NAMES, recipe

LOST = Trajectory(task_id="t", instruction="", outcome=Outcome.FAILED)
FACTS = TurnFacts(text="x", parsed=True)
ACTED = (Turn(reply=Reply(text="x"), actions=(Wait(timedelta(seconds=1)),), facts=FACTS, row=0),)
ONLY_TALKED = (replace(ACTED[0], actions=()),)


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (GuestEnded("x"), "policy", "policy"),
        (BudgetExhausted("x", budget="total"), "policy", "policy"),
        (MachineLost("x"), "host, repeat", "host, repeat"),
        (EpisodeNotFound("x"), "host, repeat", "host, repeat"),
        (Conflict("x"), "host, repeat", "host, repeat"),
        (Unreachable("x"), "host, repeat", "host, repeat"),
        (Unavailable("x"), "host, repeat", "host, repeat"),
        (SetupFailed("x"), "host, repeat", "host, repeat"),
        (GuestFailed("x"), "host, repeat", "undecided"),
        (DeadlineExceeded("x"), "host, repeat", "undecided"),
        (EvaluatorFailed("x"), "host", "undecided"),
        (LossUndecided("x"), "undecided", "undecided"),
        (SampleVoid("x"), "host", "host"),
        (PoolExhausted("x"), "host", "host"),
        (EnvError("newer than this client"), "host", "host"),
        (TaskNotFound("x"), "caller", "caller"),
        (BadRequest("x"), "caller", "caller"),
        (EpisodeEnded("x"), "caller", "caller"),
        (GenerationAborted(), "trainer", "trainer"),
        (NoReply("x", budget="time"), "trainer", "trainer"),
        (PromptMismatch("x"), "trainer", "trainer"),
        (ModelFailed("x"), "trainer", "trainer"),
        (TimeoutError(), "trainer", "trainer"),
        (RuntimeError("a parser's bug"), "undecided", "undecided"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_each_error_has_an_owner(error: Exception, before: str, after: str) -> None:
    rulings = [ruling_of(error, acted=acted) for acted in (False, True)]
    texts = [f"{ruling.owner.value}{', repeat' if ruling.repeat else ''}" for ruling in rulings]
    assert texts == [before, after]
    assert is_fault(error) == (after not in ("policy", "caller"))


#: Who owns each reason of the contract after the agent acted, and whether the episode may be repeated.
OWNERS = {
    "policy": {"GUEST_ENDED"},
    "host, repeat": {
        *("EPISODE_NOT_FOUND", "STEP_INDEX_MISMATCH", "STALE_EPOCH", "DRAINING", "POOL_FAILING"),
        *("HYPERVISOR_UNAVAILABLE", "MACHINE_LOST", "SETUP_FAILED"),
    },
    "host": {
        *("POOL_EXHAUSTED", "TOKEN_QUOTA", "RATE_LIMITED", "CHECKPOINT_UNUSABLE", "CHECKPOINT_CORRUPT"),
        *("CHECKPOINT_STORE_FULL", "IMAGE_ERROR", "CONFIG_ERROR", "HYPERVISOR_ERROR", "TEMPLATE_CORRUPT"),
        *("STORE_ERROR", "OSWORLD_ERROR", "BUG", "USER_UNAVAILABLE"),
    },
    "undecided": {"LOSS_UNDECIDED", "GUEST_UNRESPONSIVE", "GUEST_ERROR", "EVALUATOR_FAILED"},
    "trainer": {"HUMAN_IN_CONTROL"},
    "caller": {
        *("BAD_FIELD", "REQUEST_ID_REUSED", "NOT_FOUND", "TASK_NOT_FOUND", "POOL_NOT_FOUND", "IMAGE_NOT_FOUND"),
        *("CHECKPOINT_NOT_FOUND", "EPISODE_ENDED", "GROUP_TOO_LARGE", "GUEST_REFUSED", "NOT_FORKABLE"),
        *("UNAUTHENTICATED", "ACCESS_DENIED", "SCOPE_TOO_SMALL", "UNIMPLEMENTED"),
    },
}


def test_each_reason_of_the_contract_has_a_declared_owner() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for reason, code in CODE_BY_REASON.items():
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=reason))
        status = status_pb2.Status(code=grpc.StatusCode[code].value[0], message="x", details=[detail])
        trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
        failure = grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), trailing, details="x")
        ruling = ruling_of(error_of(failure, host="h"), acted=True)
        found[f"{ruling.owner.value}{', repeat' if ruling.repeat else ''}"].add(reason)
    assert found == OWNERS


def test_only_losses_by_the_host_are_repeated() -> None:
    errors = [kind for _, kind in inspect.getmembers(client, inspect.isclass) if issubclass(kind, EnvError)]
    assert MachineLost in errors
    rulings = [ruling_of(kind("x"), acted=acted) for kind in errors for acted in (False, True)]
    assert {ruling.owner for ruling in rulings if ruling.repeat} == {Owner.HOST}


@pytest.mark.parametrize(
    ("trajectory", "owner", "repeat"),
    [
        (replace(LOST, error=GuestFailed("x")), Owner.HOST, True),
        (replace(LOST, error=GuestFailed("x"), turns=ONLY_TALKED), Owner.HOST, True),
        (replace(LOST, error=GuestFailed("x"), turns=ACTED), Owner.UNDECIDED, False),
        (replace(LOST, error=MachineLost("x"), turns=ACTED), Owner.HOST, True),
        (replace(LOST, error=MachineLost("x"), turns=ACTED, guest_end_cause="PANIC"), Owner.UNDECIDED, False),
        (replace(LOST, outcome=Outcome.ABORTED), Owner.TRAINER, False),
        (replace(LOST, outcome=Outcome.ABORTED, error=MachineLost("x")), Owner.TRAINER, False),
    ],
)
def test_an_episode_in_which_the_agent_acted_is_repeated_only_if_the_host_lost_it(
    trajectory: Trajectory, owner: Owner, repeat: bool
) -> None:
    assert ruling_on(trajectory).owner is owner
    assert ruling_on(trajectory).repeat is repeat


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("MACHINE_LOST", MachineLost),
        ("LOSS_UNDECIDED", LossUndecided),
        ("GUEST_UNRESPONSIVE", GuestFailed),
        ("GUEST_ERROR", GuestFailed),
        ("USER_UNAVAILABLE", SampleVoid),
    ],
)
def test_an_end_reason_of_the_service_is_the_error_of_that_reason(reason: str, kind: type[SampleVoid]) -> None:
    error = failure_of("e", reason)
    assert (type(error), error.reason) == (kind, reason)
    assert is_fault(error)


def test_an_unknown_end_reason_is_void_and_not_repeated() -> None:
    unnamed = failure_of("e", "")
    assert (type(unnamed), unnamed.reason) == (SampleVoid, "FAILED")
    assert not ruling_of(failure_of("e", "NEWER"), acted=True).repeat
    assert ruling_of(KeyboardInterrupt(), acted=True).owner is Owner.TRAINER


@pytest.mark.parametrize(("score", "cause", "reward"), [(0.0, "PANIC", -0.1), (0.5, "PANIC", -0.1), (0.0, "", 0.0)])
def test_an_escape_is_worth_less_than_a_failure(score: float, cause: str, reward: float) -> None:
    facts = EpisodeFacts(task_id="t", task_score=score, turns=(), max_turns=9, guest_end_cause=cause)
    breakdown = reward_of(facts, recipe(), ended_by_guest_score=-0.1)
    assert breakdown.total == reward
    assert breakdown.parts.get("ended_by_guest") == (-0.1 if cause else None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("turns", [(), (FACTS,), (FACTS,) * 4])
@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_every_recipe_and_adapter_ranks_an_escape_by_the_same_rule(
    name: str, turns: tuple[TurnFacts, ...], score: float
) -> None:
    config = TrainingConfig(hosts=("h:1",), reward={"recipe": name})
    facts = EpisodeFacts(task_id="t", task_score=score, turns=turns, max_turns=9)
    escaped = config.breakdown_of(replace(facts, guest_end_cause="PANIC"))
    sessions = SessionSettings.connect(reward={"recipe": name})
    assert sessions.reward_of(replace(facts, guest_end_cause="PANIC")) == escaped
    if score == 1.0:
        assert escaped == config.breakdown_of(facts)
    else:
        failure = config.breakdown_of(replace(facts, task_score=0.0))
        assert escaped.total == failure.total - 0.1
        assert escaped.task_score == score


def test_a_task_that_is_solved_by_a_power_off_keeps_its_score() -> None:
    facts = EpisodeFacts(task_id="t", task_score=1.0, turns=(FACTS,), max_turns=9, guest_end_cause="POWER_OFF")
    assert reward_of(facts, recipe(), ended_by_guest_score=-0.1).total == 1.0
    assert reward_of(facts, recipe("task", strict=True), ended_by_guest_score=-0.1).total == 1.0
    talked_on = replace(facts, turns=(FACTS, replace(FACTS, parsed=False)))
    assert reward_of(talked_on, recipe("task", strict=True), ended_by_guest_score=-0.1).total == 0.0
