"""Every way in which an episode can end: who can cause it, whether it is scored, and whether it is repeated.

`ENDS` is the source of the tables in docs/guarantees.md and docs/evidence/guarantees.md. It must have each reason of
the contract, each error that `trainer.agent.ownership` knows, each budget, each time limit and each cause of a guest's
end.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import get_args, get_type_hints

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from cuaenv.client import AsyncEpisode, BadRequest, DeadlineExceeded, EnvError, Unavailable
from cuaenv.client.errors import error_of
from cuaenv.reasons import CODE_BY_REASON
from envd.base.config import LimitsConfig, TasksConfig
from envd.base.losses import ENDS_MACHINE
from envd.episodes.opening import _COMPARISON_ADMISSION_S
from trainer.adapters.session import SessionSettings
from trainer.agent.ownership import _TABLE, Owner, ruling_of
from trainer.agent.settings import AgentSettings
from trainer.agent.training import TrainingConfig
from trainer.agent.types import BudgetExhausted, GenerationAborted, ModelFailed, NoReply

ROOT = Path(__file__).parents[4]
SERVICE = "tests/unit/envd/episodes/test_service.py"
STEP_TIME = "tests/unit/envd/episodes/test_step_time.py"
LOOP = "tests/unit/trainer/agent/test_agent_loop_faults.py"
SLIME = "tests/e2e/test_slime_generate.py"
USER = "tests/contract/test_user_model.py"
OWNERS = "tests/unit/trainer/agent/test_ownership.py::test_each_reason_of_the_contract_has_a_declared_owner"

CONTINUES, SCORED, VOID, UNDECIDED = "continues", "scored", "void", "void, undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One row."""

    way: str
    by: str
    """Who can cause it: the agent, the host, or another party."""
    result: str
    shows: str
    """What the caller sees, in Markdown."""
    tests: tuple[str, ...]
    repeated: bool = False
    acted: bool = True
    """Whether it is the rule for episodes in which the agent has acted, too."""
    reasons: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = ()
    limits: tuple[str, ...] = ()
    """Settings, budgets and causes of a guest's end that belong here."""


ENDS = (
    # What the agent does.
    End(
        way="declares the task done or infeasible",
        by="agent",
        result=SCORED,
        shows="`AGENT_DONE`, `AGENT_FAIL`",
        tests=(f"{SERVICE}::test_evaluate_waits_for_the_running_step_and_sees_its_end_state",),
    ),
    End(
        way="makes a mistake: a reply that cannot be read, a point off the screen, a tool that fails",
        by="agent",
        result=CONTINUES,
        shows="text for the agent",
        tests=(
            f"{SERVICE}::test_the_agents_mistakes_are_in_the_result",
            f"{LOOP}::test_an_action_that_the_service_refuses_is_a_mistake_and_other_refusals_void_the_episode",
        ),
    ),
    End(
        way="asks for waits, commands or texts of more than 120 s in one step",
        by="agent",
        result=CONTINUES,
        shows="text for the agent: not performed, or cut short",
        tests=(
            f"{STEP_TIME}::test_the_actions_of_a_step_share_two_minutes_and_the_rest_is_reported",
            f"{STEP_TIME}::test_a_step_lasts_no_longer_than_its_client_waits",
            "tests/contract/test_api_client.py::test_a_step_waits_for_its_actions_and_for_the_service",
        ),
    ),
    End(
        way="asks the task's user what alone gets no answer: a full context, a filter, too much to think about",
        by="agent",
        result=CONTINUES,
        shows="the user does not know",
        tests=(f"{USER}::test_a_question_that_alone_gets_no_answer_is_one_that_the_user_cannot_answer",),
        limits=("tasks.user_timeout_s",),
    ),
    End(
        way="uses up its turns, steps, tokens, pictures or time",
        by="agent",
        result=SCORED,
        shows="`TRUNCATED`",
        tests=(
            f"{LOOP}::test_an_exhausted_budget_truncates_and_the_state_is_evaluated_once",
            f"{LOOP}::test_a_timeout_during_a_step_truncates_and_the_reply_is_recorded",
            f"{SERVICE}::test_the_step_limit_truncates",
        ),
        errors=(BudgetExhausted,),
        limits=("prompt", "images", "turns", "reply", "total", "time", "agent.timeout_s"),
    ),
    End(
        way="replies with the placeholder of a picture, after its first reply",
        by="agent",
        result=SCORED,
        shows="`TRUNCATED`",
        tests=(
            f"{SLIME}::test_a_sampled_image_placeholder_ends_the_episode_which_is_scored_unless_it_is_the_first_reply",
        ),
        limits=("placeholder",),
    ),
    End(
        way="powers its machine off, restarts or panics it, or fills its disk",
        by="agent",
        result=SCORED,
        shows="`GUEST_ENDED`",
        tests=(
            f"{SERVICE}::test_a_step_in_which_the_guest_powers_off_ends_the_episode_and_scores_0",
            f"{SLIME}::test_a_group_in_which_failures_escape_keeps_its_statistics",
        ),
        reasons=("GUEST_ENDED",),
        limits=("POWER_OFF", "REBOOT", "PANIC", "DISK_FULL"),
    ),
    End(
        way="ends its session, or stops the guest from answering, although the host lets it run",
        by="agent",
        result=SCORED,
        shows="`GUEST_ENDED`",
        tests=(
            f"{SERVICE}::test_a_session_that_ends_is_evaluated_on_what_is_left",
            f"{SERVICE}::test_a_checker_that_the_ended_session_cannot_answer_scores_0",
        ),
        limits=("SESSION_ENDED", "UNRESPONSIVE", "limits.hang_timeout_s"),
    ),
    End(
        way="leaves what checkers cannot read, are too late for, or end at, although they work at the task's start",
        by="agent",
        result=SCORED,
        shows="`GUEST_ENDED`, 0",
        tests=(
            f"{SERVICE}::test_what_the_agent_made_uncheckable_scores_0_if_checked_twice",
            f"{SERVICE}::test_an_evaluation_that_is_late_or_whose_judge_ends_is_compared_like_one_that_fails",
            "tests/contract/test_osworld_bridge.py::test_a_file_of_the_agent_that_makes_a_function_raise_scores_0",
        ),
        limits=("UNCHECKABLE", "limits.evaluate_timeout_s", "agent.evaluate_timeout_s", "session.evaluate_timeout"),
    ),
    End(
        way="leaves what takes more memory or processor time to judge than the limit",
        by="agent",
        result=SCORED,
        shows="0",
        tests=("tests/contract/test_judging.py::test_memory_beyond_the_limit_scores_0",),
    ),
    End(
        way="keeps its session busy beyond the limit of an action, or the host keeps the guest from running, until it"
        " answers again",
        by="agent or host",
        result=CONTINUES,
        shows="text for the agent",
        tests=("tests/contract/test_stalls.py::test_a_session_that_was_late_and_answers_again_has_not_ended",),
    ),
    # What the host does.
    End(
        way="the daemon is stopped or gets no processor, for less than the client waits",
        by="host",
        result=CONTINUES,
        shows="a late response",
        tests=(
            "tests/contract/test_stalls.py::test_a_stopped_daemon_is_not_the_guests_end",
            "tests/unit/envd/base/test_clock.py::test_a_stall_of_the_process_takes_no_more_than_one_tick_from_a_limit",
            f"{SERVICE}::test_a_stall_of_the_daemon_does_not_expire_leases",
        ),
    ),
    End(
        way="the machine is killed, the host's disk is full, or the daemon restarts during a step",
        by="host",
        result=VOID,
        repeated=True,
        shows="`MACHINE_LOST`",
        tests=(
            f"{SERVICE}::test_a_machine_killed_during_a_step_is_machine_lost_in_all_later_calls",
            f"{SERVICE}::test_a_checker_that_the_hosts_full_disk_stops_voids_the_episode_as_lost",
            f"{SLIME}::test_an_episode_on_a_lost_machine_is_repeated_on_a_new_one",
        ),
        reasons=("MACHINE_LOST",),
    ),
    End(
        way="the daemon cannot be reached, is stopping, or cannot start machines",
        by="host",
        result=VOID,
        repeated=True,
        shows="`Unavailable`",
        tests=(f"{SLIME}::test_an_episode_of_a_killed_host_is_repeated_on_another", OWNERS),
        reasons=("DRAINING", "POOL_FAILING", "HYPERVISOR_UNAVAILABLE"),
        errors=(Unavailable,),
    ),
    End(
        way="the lease expired, or another caller stepped the episode or rolled it back",
        by="host, caller",
        result=VOID,
        repeated=True,
        shows="`EPISODE_NOT_FOUND`, `STEP_INDEX_MISMATCH`, `STALE_EPOCH`",
        tests=(f"{SERVICE}::test_an_unused_lease_expires_and_the_machine_is_reclaimed", OWNERS),
        reasons=("EPISODE_NOT_FOUND", "STEP_INDEX_MISMATCH", "STALE_EPOCH"),
    ),
    End(
        way="the setup fails, or the guest fails before the agent has acted",
        by="host, task",
        result=VOID,
        repeated=True,
        acted=False,
        shows="`SETUP_FAILED`, `GUEST_UNRESPONSIVE`, `GUEST_ERROR`",
        tests=(
            "tests/unit/trainer/agent/test_ownership.py"
            "::test_an_episode_in_which_the_agent_acted_is_repeated_only_if_the_host_lost_it",
        ),
        reasons=("SETUP_FAILED", "GUEST_UNRESPONSIVE", "GUEST_ERROR"),
        limits=("limits.setup_timeout_s",),
    ),
    End(
        way="no machine becomes free in time, or a quota or rate is reached",
        by="host, caller",
        result=VOID,
        shows="`POOL_EXHAUSTED`, `TOKEN_QUOTA`, `RATE_LIMITED`",
        tests=(OWNERS,),
        reasons=("POOL_EXHAUSTED", "TOKEN_QUOTA", "RATE_LIMITED"),
        limits=("agent.reset_timeout_s", "session.reset_timeout", "limits.drain_timeout_s"),
    ),
    End(
        way="the daemon's database, hypervisor, template, image, checkpoint or code fails",
        by="host",
        result=VOID,
        shows="`HYPERVISOR_ERROR`, `STORE_ERROR`, `BUG` and others of `INTERNAL`",
        tests=(OWNERS,),
        reasons=(
            *("CHECKPOINT_UNUSABLE", "CHECKPOINT_CORRUPT", "CHECKPOINT_STORE_FULL", "IMAGE_ERROR", "CONFIG_ERROR"),
            *("HYPERVISOR_ERROR", "TEMPLATE_CORRUPT", "STORE_ERROR", "OSWORLD_ERROR", "BUG"),
        ),
        errors=(EnvError,),
    ),
    End(
        way="the model that plays the task's user answers no question, envd's own included",
        by="user's model",
        result=VOID,
        shows="`USER_UNAVAILABLE`",
        tests=(f"{USER}::test_an_endpoint_that_answers_no_question_voids_the_episode",),
        reasons=("USER_UNAVAILABLE",),
    ),
    # What nothing shows.
    End(
        way="the guest does not answer, and the host may have kept it from running",
        by="unknown",
        result=UNDECIDED,
        shows="`LOSS_UNDECIDED`",
        tests=(
            f"{SERVICE}::test_a_guest_failure_without_evidence_voids_the_episode",
            "tests/unit/envd/base/test_losses.py::test_a_silent_guest_has_an_owner",
            f"{SLIME}::test_an_undecided_loss_is_void_counted_apart_and_not_repeated",
        ),
        reasons=("LOSS_UNDECIDED",),
    ),
    End(
        way="no response comes in the time that a client waits, which is longer than all limits of the daemon",
        by="host",
        result=UNDECIDED,
        shows="`DeadlineExceeded`",
        tests=(f"{SLIME}::test_a_daemon_killed_in_mid_episode_voids_the_sample", OWNERS),
        errors=(DeadlineExceeded,),
        limits=("agent.step_timeout_s", "session.step_timeout"),
    ),
    End(
        way="checkers fail at the task's start too, or no machine becomes free to check it",
        by="task, host",
        result=UNDECIDED,
        shows="`EVALUATOR_FAILED`",
        tests=(
            f"{SERVICE}::test_a_checker_that_fails_at_the_start_too_gives_no_score",
            f"{SERVICE}::test_a_failed_check_that_no_machine_is_free_to_compare_gives_no_score",
        ),
        reasons=("EVALUATOR_FAILED",),
    ),
    # What the trainer does.
    End(
        way="the first reply has the placeholder of a picture, and leaves nothing that could be trained",
        by="agent",
        result=VOID,
        shows="`no_reply_placeholder`",
        tests=(
            f"{SLIME}::test_a_sampled_image_placeholder_ends_the_episode_which_is_scored_unless_it_is_the_first_reply",
        ),
        errors=(NoReply,),
    ),
    End(
        way="the engine fails, is too late, reads other tokens, or a budget has no space for one reply",
        by="trainer",
        result=VOID,
        shows="`ModelFailed`",
        tests=(
            f"{LOOP}::test_an_engine_failure_voids_the_episode",
            f"{LOOP}::test_a_budget_exhausted_before_the_first_reply_voids_the_episode",
        ),
        errors=(ModelFailed, TimeoutError),
        limits=("train.engine_timeout_s",),
    ),
    End(
        way="the trainer stops the rollout, or leaves a session without a call",
        by="trainer",
        result=VOID,
        shows="`ABORTED`, `SessionVoid`",
        tests=(f"{LOOP}::test_an_aborted_episode_is_not_evaluated",),
        errors=(GenerationAborted,),
        limits=("session.idle_timeout",),
    ),
    End(
        way="a person takes control",
        by="person",
        result=VOID,
        shows="`HUMAN_IN_CONTROL`",
        tests=(
            "tests/contract/test_console_control.py::test_a_person_acts_while_the_agent_is_refused_and_hands_back",
            OWNERS,
        ),
        reasons=("HUMAN_IN_CONTROL",),
    ),
    End(
        way="the caller's request is invalid or not allowed",
        by="caller",
        result=VOID,
        shows="`BAD_FIELD`, `NOT_FOUND`, `ACCESS_DENIED` and others; the caller gets the error",
        tests=(OWNERS,),
        reasons=(
            *("BAD_FIELD", "REQUEST_ID_REUSED", "NOT_FOUND", "TASK_NOT_FOUND", "POOL_NOT_FOUND", "IMAGE_NOT_FOUND"),
            *("CHECKPOINT_NOT_FOUND", "EPISODE_ENDED", "GROUP_TOO_LARGE", "GUEST_REFUSED", "NOT_FORKABLE"),
            *("UNAUTHENTICATED", "ACCESS_DENIED", "SCOPE_TOO_SMALL", "UNIMPLEMENTED"),
        ),
        errors=(BadRequest,),
    ),
    End(
        way="the trainer's own code has a bug",
        by="unknown",
        result=UNDECIDED,
        shows="the exception's name",
        tests=(f"{LOOP}::test_an_unexpected_error_voids_the_episode_and_is_not_raised",),
        errors=(Exception,),
    ),
)

#: Void by the agent's choice alone. No token of such an episode is trained, so no update can favour the choice.
UNTRAINED = "the first reply has the placeholder of a picture, and leaves nothing that could be trained"


def error_by(reason: str) -> EnvError:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason))
    code = grpc.StatusCode[CODE_BY_REASON[reason]]
    status = status_pb2.Status(code=code.value[0], message="x", details=[detail])
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="x"), host="h")


def rules(end: End) -> Iterator[tuple[str, bool]]:
    """Yield what the table of owners makes of a row's errors."""
    results: Mapping[Owner, str] = {Owner.POLICY: SCORED, Owner.UNDECIDED: UNDECIDED}
    errors: list[BaseException] = [error_by(reason) for reason in end.reasons]
    for kind in end.errors:
        if issubclass(kind, BudgetExhausted | NoReply):
            errors.append(kind("x", budget="total"))
        else:
            errors.append(kind("x"))
    for error in errors:
        ruling = ruling_of(error, acted=end.acted)
        yield results.get(ruling.owner, VOID), ruling.repeat


def limits() -> set[str]:
    """Return the names of all budgets, time limits and causes of a guest's end."""
    causes = ENDS_MACHINE | {"SESSION_ENDED", "UNRESPONSIVE", "UNCHECKABLE"}
    sections: Mapping[str, Iterable[str]] = {
        "limits": LimitsConfig.model_fields,
        "tasks": TasksConfig.model_fields,
        "train": TrainingConfig.model_fields,
        "agent": [each.name for each in fields(AgentSettings)],
        "session": [each.name for each in fields(SessionSettings)],
    }
    named = {f"{section}.{name}" for section, names in sections.items() for name in names if "timeout" in name}
    budgets = get_args(get_type_hints(BudgetExhausted.__init__)["budget"])
    return {*causes, *named, *budgets}


def test_the_table_has_every_reason_error_budget_and_time_limit_once() -> None:
    reasons = [reason for end in ENDS for reason in end.reasons]
    assert sorted(reasons) == sorted(CODE_BY_REASON)
    found = [name for end in ENDS for name in end.limits]
    assert sorted(found) == sorted(limits())
    errors = {type(error_by(reason)) for reason in reasons} | {error for end in ENDS for error in end.errors}
    assert {kind for kind in _TABLE if not any(issubclass(error, kind) for error in errors)} == set()


def test_clients_wait_longer_than_an_evaluation_and_its_comparison_with_the_start() -> None:
    daemon = LimitsConfig()
    longest_s = 3 * daemon.evaluate_timeout_s + _COMPARISON_ADMISSION_S + daemon.setup_timeout_s
    session = next(each.default for each in fields(SessionSettings) if each.name == "evaluate_timeout")
    client = inspect.signature(AsyncEpisode.evaluate).parameters["timeout"].default
    for wait in (timedelta(seconds=AgentSettings().evaluate_timeout_s), session, client):
        assert isinstance(wait, timedelta)
        assert wait.total_seconds() > longest_s


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.way[:50])
def test_each_row_is_what_the_table_of_owners_decides(end: End) -> None:
    assert set(rules(end)) <= {(end.result, end.repeated)}


def test_the_agent_alone_chooses_neither_void_nor_repetition() -> None:
    chosen = [end.way for end in ENDS if end.by == "agent" and (end.result not in (SCORED, CONTINUES) or end.repeated)]
    assert chosen == [UNTRAINED]
    shared = [end for end in ENDS if "agent" in end.by and end.by != "agent"]
    assert {end.result for end in shared} == {CONTINUES}


def test_the_pages_have_the_table() -> None:
    columns = [(end.way, end.by, end.result, "yes" if end.repeated else "no", end.shows) for end in ENDS]
    rows = [f"| {' | '.join(row)} |" for row in columns]
    proofs = [f"| {end.way} | {', '.join(f'`{test}`' for test in end.tests)} |" for end in ENDS]
    for name, lines in (("guarantees.md", rows), ("evidence/guarantees.md", proofs)):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        section = page.partition("## How an episode can end\n")[2].partition("\n## ")[0]
        found = [line for line in section.splitlines() if re.match(r"\| (?!-)", line)][1:]
        assert found == lines, f"docs/{name}: replace the rows of its table with\n" + "\n".join(lines)
