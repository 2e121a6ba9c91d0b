"""Every error has its gRPC code, reason and details, and is documented."""

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from cuaenv.client.errors import _BY_CODE, _BY_REASON
from cuaenv.reasons import CODE_BY_REASON
from envd.api.status import code_of, status_of
from envd.base import errors

Code = grpc.StatusCode

TABLE: list[tuple[errors.EnvdError, Code, str]] = [
    (errors.InvalidRequest("a.b", "is wrong"), Code.INVALID_ARGUMENT, "BAD_FIELD"),
    (errors.RequestIdReused("r-1"), Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED"),
    (errors.ObjectNotFound("x"), Code.NOT_FOUND, "NOT_FOUND"),
    (errors.EpisodeNotFound("x"), Code.NOT_FOUND, "EPISODE_NOT_FOUND"),
    (errors.TaskNotFound("x"), Code.NOT_FOUND, "TASK_NOT_FOUND"),
    (errors.PoolNotFound("x"), Code.NOT_FOUND, "POOL_NOT_FOUND"),
    (errors.ImageNotFound("x"), Code.NOT_FOUND, "IMAGE_NOT_FOUND"),
    (errors.EpisodeEnded("x"), Code.FAILED_PRECONDITION, "EPISODE_ENDED"),
    (errors.GuestEnded("x", cause="POWER_OFF"), Code.FAILED_PRECONDITION, "GUEST_ENDED"),
    (errors.GroupTooLarge("x"), Code.FAILED_PRECONDITION, "GROUP_TOO_LARGE"),
    (errors.StepIndexMismatch("x"), Code.ABORTED, "STEP_INDEX_MISMATCH"),
    (errors.PoolExhausted("x", retry_after_s=1.5), Code.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED"),
    (errors.PoolFailing("x", retry_after_s=3.0), Code.UNAVAILABLE, "POOL_FAILING"),
    (errors.Draining("x", retry_after_s=2.0), Code.UNAVAILABLE, "DRAINING"),
    (errors.AccessDenied("x"), Code.PERMISSION_DENIED, "ACCESS_DENIED"),
    (errors.ScopeTooSmall("x"), Code.PERMISSION_DENIED, "SCOPE_TOO_SMALL"),
    (errors.Unauthenticated("x"), Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    (errors.TokenQuotaReached("x", retry_after_s=5.0), Code.RESOURCE_EXHAUSTED, "TOKEN_QUOTA"),
    (errors.RateLimited("x", retry_after_s=0.5), Code.RESOURCE_EXHAUSTED, "RATE_LIMITED"),
    (errors.StaleEpoch("x"), Code.ABORTED, "STALE_EPOCH"),
    (errors.TooLarge("x"), Code.DATA_LOSS, "GUEST_ERROR"),
    (errors.HumanInControl("x", retry_after_s=1.0), Code.FAILED_PRECONDITION, "HUMAN_IN_CONTROL"),
    (errors.Unimplemented("x"), Code.UNIMPLEMENTED, "UNIMPLEMENTED"),
    (errors.MachineLost("x"), Code.DATA_LOSS, "MACHINE_LOST"),
    (errors.LossUndecided("x"), Code.DATA_LOSS, "LOSS_UNDECIDED"),
    (errors.GuestUnresponsive("x"), Code.DATA_LOSS, "GUEST_UNRESPONSIVE"),
    (errors.GuestServiceEnded("x"), Code.DATA_LOSS, "GUEST_UNRESPONSIVE"),
    (errors.GuestError("x"), Code.DATA_LOSS, "GUEST_ERROR"),
    (errors.UserUnavailable("x"), Code.DATA_LOSS, "USER_UNAVAILABLE"),
    (errors.DisplayError("x"), Code.DATA_LOSS, "GUEST_ERROR"),
    (errors.GuestRefused("x"), Code.FAILED_PRECONDITION, "GUEST_REFUSED"),
    (errors.CheckpointNotFound("x"), Code.NOT_FOUND, "CHECKPOINT_NOT_FOUND"),
    (errors.CheckpointUnusable("x"), Code.FAILED_PRECONDITION, "CHECKPOINT_UNUSABLE"),
    (errors.CheckpointStoreFull("x"), Code.FAILED_PRECONDITION, "CHECKPOINT_STORE_FULL"),
    (errors.CheckpointCorrupt("x"), Code.INTERNAL, "CHECKPOINT_CORRUPT"),
    (errors.NotForkable("x"), Code.FAILED_PRECONDITION, "NOT_FORKABLE"),
    (errors.SetupFailed("x"), Code.INTERNAL, "SETUP_FAILED"),
    (errors.EvaluatorFailed("x"), Code.INTERNAL, "EVALUATOR_FAILED"),
    (errors.HypervisorError("x"), Code.INTERNAL, "HYPERVISOR_ERROR"),
    (errors.HypervisorUnavailable("x", retry_after_s=5.0), Code.UNAVAILABLE, "HYPERVISOR_UNAVAILABLE"),
    (errors.TemplateCorrupt("x"), Code.INTERNAL, "TEMPLATE_CORRUPT"),
    (errors.StoreError("x"), Code.INTERNAL, "STORE_ERROR"),
    (errors.ImageError("x"), Code.INTERNAL, "IMAGE_ERROR"),
    (errors.ConfigError("x"), Code.INTERNAL, "CONFIG_ERROR"),
    (errors.OsworldError("x"), Code.INTERNAL, "OSWORLD_ERROR"),
    (errors.RetryableError("x", retry_after_s=1.0), Code.INTERNAL, "BUG"),
    (errors.EnvdError("x"), Code.INTERNAL, "BUG"),
]


def unpacked(sent: status_pb2.Status) -> dict[str, object]:
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest)
    found: dict[str, object] = {}
    for detail in sent.details:
        for kind in kinds:
            message = kind()
            if detail.Unpack(message):
                found[kind.__name__] = message
    return found


@pytest.mark.parametrize(("error", "code", "reason"), TABLE, ids=lambda value: type(value).__name__)
def test_a_failure_has_its_code_and_reason(error: errors.EnvdError, code: Code, reason: str) -> None:
    sent = status_of(error, metadata={"episode_id": "ep-1"})
    number, _ = code.value
    assert (code_of(error), sent.code, sent.message) == (code, number, str(error))
    assert unpacked(sent)["ErrorInfo"] == error_details_pb2.ErrorInfo(
        reason=reason, domain="cuaenv", metadata={"episode_id": "ep-1"}
    )


EVERY_ERROR = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EnvdError)}


def test_the_test_table_has_every_error() -> None:
    assert {type(error) for error, _, _ in TABLE} == EVERY_ERROR


def test_the_table_of_reasons_has_exactly_those_of_the_classes() -> None:
    assert {kind.reason for kind in EVERY_ERROR} == set(CODE_BY_REASON)


def test_the_client_has_a_class_for_every_code_and_only_for_reasons_of_the_contract() -> None:
    assert set(CODE_BY_REASON.values()) <= set(_BY_CODE) <= {code.name for code in Code}
    assert set(_BY_REASON) <= set(CODE_BY_REASON)


@pytest.mark.parametrize(
    "reason", sorted(set(_BY_REASON) - {"EPISODE_ENDED", "GUEST_ENDED", "HUMAN_IN_CONTROL", "CHECKPOINT_CORRUPT"})
)
def test_a_reason_has_a_class_of_the_family_of_its_code(reason: str) -> None:
    assert issubclass(_BY_REASON[reason], _BY_CODE[CODE_BY_REASON[reason]])


@pytest.mark.parametrize(("error", "code", "reason"), TABLE, ids=lambda value: type(value).__name__)
def test_only_retryable_errors_carry_a_retry_delay(error: errors.EnvdError, code: Code, reason: str) -> None:
    retry = unpacked(status_of(error, metadata={})).get("RetryInfo")
    if isinstance(error, errors.RetryableError):
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToTimedelta().total_seconds() == error.retry_after_s
    else:
        assert retry is None


def test_a_bad_field_is_named_in_the_details() -> None:
    sent = status_of(errors.InvalidRequest("actions[2].click.count", "11 is too many"), metadata={})
    bad = unpacked(sent)["BadRequest"]
    assert isinstance(bad, error_details_pb2.BadRequest)
    [violation] = bad.field_violations
    assert (violation.field, violation.description) == ("actions[2].click.count", "11 is too many")


def test_an_unexpected_exception_is_a_bug_and_its_text_is_not_sent() -> None:
    sent = status_of(ValueError("password=hunter2"), metadata={})
    info = unpacked(sent)["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (sent.code, info.reason) == (Code.INTERNAL.value[0], "BUG")
    assert sent.message == "a bug in envd (ValueError); its log has the traceback"


def test_a_long_message_is_cut_to_fit_into_the_headers() -> None:
    error = errors.InvalidRequest("x" * 100, "€" * 10_000)
    sent = status_of(error, metadata={"request_id": "r" * 10_000})
    assert sent.message.endswith("...")
    assert sent.ByteSize() < 4096
