"""Output of OSWorld's sandbox and requests to the guest's proxy: data or a typed error, whatever the bytes."""

import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from envd.base.errors import GuestError
from envd.desktop.gateway import parse_head
from envd.integrations.osworld.bridge import outcome_of
from envd.integrations.osworld.worker.traffic import incompleteness
from envd.integrations.osworld.workers import WorkerJob, parse_result
from tests.support.fuzz import fuzzed, inputs, json_values, with_corpus

JOB = WorkerJob(
    kind="set_up", guest_url="", platform="Linux", screen_px=(1280, 800), time_s=1.0, steps=[{"type": "open"}]
)
lines = st.lists(
    json_values | st.dictionaries(st.sampled_from(["port", "result", "failure", "end"]), json_values, max_size=4),
    max_size=5,
)
outputs = lines.map(lambda values: b"".join(json.dumps(value).encode() + b"\n" for value in values))
results = st.dictionaries(
    st.sampled_from(["score", "parts"]), json_values | st.lists(st.lists(json_values, min_size=3, max_size=3))
)


@fuzzed(80)
@with_corpus("worker")
@given(outputs | inputs("worker"))
def test_any_output_of_a_worker_is_a_result_or_a_failure(data: bytes) -> None:
    with suppress(GuestError):
        outcome_of(parse_result(data))
    with suppress(GuestError):
        assert isinstance(parse_result(data), dict)


@fuzzed(60)
@given(results)
def test_any_result_yields_an_outcome_or_a_failure(result: dict[str, object]) -> None:
    with suppress(GuestError):
        outcome = outcome_of(result)
        assert 0.0 <= outcome.score <= 1.0
        assert isinstance(outcome.evidence, str)


@fuzzed(60)
@given(inputs("worker") | st.dictionaries(st.just("step"), json_values).map(lambda said: json.dumps(said).encode()))
def test_any_line_of_a_worker_names_one_of_its_steps_or_none(line: bytes) -> None:
    assert JOB.step_name(line) in {"", "config[0] open"}


trees = st.recursive(
    json_values,
    lambda inner: st.fixed_dictionaries(
        {}, optional={"children": st.lists(inner, max_size=3), "truncated": json_values, "error": json_values}
    ),
    max_leaves=10,
)


@fuzzed(100)
@with_corpus("guest-answer")
@given(
    inputs("guest-answer")
    | st.fixed_dictionaries(
        {}, optional={"directory_tree": trees, "output": json_values, "truncated": json_values}
    ).map(lambda said: json.dumps(said).encode())
)
def test_any_response_of_the_guest_is_complete_or_has_a_reason(body: bytes) -> None:
    assert isinstance(incompleteness(body.decode("utf-8", "replace")), str)


@fuzzed(100)
@with_corpus("proxy")
@given(inputs("proxy", max_size=300))
def test_any_bytes_are_a_valid_proxy_request_or_an_error(head: bytes) -> None:
    try:
        destination, first = parse_head(head + b"\r\n\r\n")
    except ValueError:
        return
    assert destination.host
    assert 1 <= destination.port <= 65535
    if first:
        names = [line.partition(b":")[0].strip().lower() for line in first.split(b"\r\n")]
        assert names.count(b"host") == 1
