"""Output of a sandbox is untrusted: it yields a result or a failure."""

import math

import pytest

from envd.base.errors import GuestError
from envd.integrations.osworld.bridge import outcome_of
from envd.integrations.osworld.workers import WorkerJob, parse_result
from envd.tasks.text import CheckOutcome

JOB = WorkerJob(
    kind="set_up", guest_url="", platform="Linux", screen_px=(1280, 800), time_s=1.0, steps=[{"type": "open"}]
)


def test_a_result_counts_if_the_job_ended_by_itself_and_its_evidence_lists_each_metric() -> None:
    result = {"score": 0.5, "parts": [["half", 0.5, "'x'"], ["exact_match", 0, "missing"]]}
    assert outcome_of(result) == CheckOutcome(0.5, "half 0.5: 'x'; exact_match 0: missing")
    assert parse_result(b'{"port": 5000}\n{"result": {"score": 1.0}}\n{"end": ""}\n') == {"score": 1.0}
    assert JOB.step_name(b'{"step": 0}\n') == "config[0] open"
    assert JOB.step_name(b'{"step": 1}\n') == JOB.step_name(b'{"result": {}}\n') == ""


@pytest.mark.parametrize(
    "score", [math.nan, math.inf, -math.inf, -0.001, 1.001, 10, "1.0", None, [1], pytest.param(10**400, id="huge")]
)
def test_a_score_outside_0_to_1_is_a_failure(score: object) -> None:
    for result in ({"score": score, "parts": []}, {"score": 1.0, "parts": [["m", score, "x"]]}):
        with pytest.raises(GuestError, match=r"not a score in \[0, 1\]"):
            outcome_of(result)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"result": {"score": 1.0}}\n', "without a result"),
        (b'{"end": ""}\n', "without a result"),
        (b'{"result": 1.0}\n{"end": ""}\n', "without a result"),
        (b'{"result": {"score": 1.0}}\n{"end": "exceeded its limit of 1 s"}\n', "exceeded its limit"),
        (b'{"failure": "broke"}\n{"end": ""}\n', "broke"),
        (b'{"result": {"score": 1.0}}\n{"failure": "broke"}\n{"end": ""}\n', "broke"),
        (b"{}{\n", "malformed"),
    ],
)
def test_anything_else_is_a_failure(data: bytes, message: str) -> None:
    with pytest.raises(GuestError, match=message):
        parse_result(data)
