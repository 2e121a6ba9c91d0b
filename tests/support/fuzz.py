"""Settings, seeds and strategies of the tests in tests/fuzz.

An ordinary run tries few, fixed examples. `make fuzz` sets FUZZ and tries many random ones, in rounds. The files in
tests/fuzz/corpus/PARSER are real inputs, and inputs that once failed; both runs try them as they are and changed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, example, settings
from hypothesis import strategies as st

Test = TypeVar("Test", bound=Callable[..., Any])

_CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
_IS_LONG = bool(os.environ.get("FUZZ"))
_ROUND_FACTOR = 5

#: JSON values, including those that break careless code: long numbers, lone surrogates, almost-base64.
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "é", "\ud800", "YQ==", "YQ", 2**31, 2**63, -1, float("inf"), float("nan"), 10**400])
)
json_values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def fuzzed(examples: int) -> Callable[[Test], Test]:
    """Set the number of examples of an ordinary run; a round of `make fuzz` tries five times as many."""
    return settings(
        max_examples=examples * (_ROUND_FACTOR if _IS_LONG else 1),
        derandomize=not _IS_LONG,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def corpus(parser: str) -> list[bytes]:
    """Return the inputs of a parser in the corpus."""
    return [path.read_bytes() for path in sorted((_CORPUS / parser).iterdir())]


def with_corpus(parser: str, *before: Any) -> Callable[[Test], Test]:
    """Try each input of the corpus, unchanged; `before` are the arguments in front of it."""

    def decorate(test: Test) -> Test:
        for data in corpus(parser):
            test = example(*before, data)(test)
        return test

    return decorate


@st.composite
def mutated(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> bytes:
    """Data of `source` with some bytes changed, parts removed or repeated, and perhaps truncated."""
    data = bytearray(draw(source))
    for _ in range(draw(st.integers(0, 6))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.integers(0, 3)):
            case 0 | 1:
                data[at] = draw(st.integers(0, 255))
            case 2:
                del data[at : at + draw(st.integers(1, 8))]
            case 3:
                end = at + draw(st.integers(1, 16))
                data[at:at] = data[at:end] * draw(st.sampled_from([1, 2, 50]))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def inputs(parser: str, *, max_size: int = 200) -> st.SearchStrategy[bytes]:
    """Return arbitrary bytes, and changed inputs of the corpus."""
    return st.binary(max_size=max_size) | mutated(st.sampled_from(corpus(parser)))
