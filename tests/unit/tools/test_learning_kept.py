"""How much of a gain on drawn tasks is kept on real widgets."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tools.learning.__main__ import app
from tests.tools.learning.kept import kept
from trainer.config import InputError
from trainer.evaluate.results import Attempt, Run

_DRAWN = {"drawn/press?seed=1": 0.0, "drawn/press?seed=2": 0.0, "drawn/close-tick?seed=1": 1.0}
_REAL = {"widgets/press-1": 0.0, "widgets/press-2": 0.0, "widgets/close-tick-1": 0.0}


def _file(path: Path, scores: Mapping[str, float | None]) -> Path:
    run = Run(label=path.stem, settings={}, prompt_hash="p")
    attempts = [
        Attempt(
            task_id=task_id,
            suite=task_id.partition("/")[0],
            level=1,
            domain="forms",
            infeasible=False,
            seed=0,
            outcome="failed" if score is None else "terminated",
            reason="done",
            score=score,
        )
        for task_id, score in scores.items()
    ]
    path.write_text("".join(f"{each.model_dump_json()}\n" for each in (run, *attempts)), encoding="utf-8")
    return path


def test_the_kept_share_is_that_of_all_policies_and_of_each(tmp_path: Path) -> None:
    drawn = [
        _file(tmp_path / "d0.jsonl", _DRAWN),
        _file(tmp_path / "d1.jsonl", dict.fromkeys(_DRAWN, 1.0)),
        _file(tmp_path / "d2.jsonl", {**_DRAWN, "drawn/press?seed=1": 1.0}),
    ]
    real = [
        _file(tmp_path / "r0.jsonl", _REAL),
        _file(tmp_path / "r1.jsonl", {**_REAL, "widgets/press-1": 1.0}),
        _file(tmp_path / "r2.jsonl", {**_REAL, "widgets/press-1": 1.0, "widgets/close-tick-1": 0.5}),
    ]
    arguments = [text for path in drawn for text in ("--drawn", str(path))]
    arguments += [text for path in real for text in ("--real", str(path))]
    printed = CliRunner().invoke(app, ["kept", *arguments])
    assert printed.exit_code == 0, printed.output
    found = json.loads(printed.stdout)
    assert found["drawn"]["templates"] == {"close-tick": [1, 1, 1], "press": [0, 2, 1]}
    assert (found["drawn"]["before"]["rate"], found["drawn"]["after"]["right"]) == (0.3333, 5)
    assert [each["right"] for each in found["real"]["after_by_policy"]] == [1, 1], "partial credit is no success"
    assert [found["kept"]["share"], *(each["share"] for each in found["kept_by_policy"])] == [0.667, 0.5, 1.0]
    assert found["kept"]["ci95"][0] < 0.667 <= found["kept"]["ci95"][1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"widgets/press-2": None}, "press-2 needs one attempt with a score"),
        ({"widgets/press-02": 1.0}, "press-2 needs one attempt with a score"),
        ({"widgets/press-3": 1.0}, "has other tasks than"),
        ({"widgets/plain": 1.0}, "widgets/plain is not a variant of a template"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, changed: Mapping[str, float | None], message: str) -> None:
    drawn = [_file(tmp_path / "d0.jsonl", _DRAWN), _file(tmp_path / "d1.jsonl", dict.fromkeys(_DRAWN, 1.0))]
    real = [_file(tmp_path / "r0.jsonl", _REAL), _file(tmp_path / "r1.jsonl", {**_REAL, **changed})]
    with pytest.raises(InputError, match=message):
        kept(drawn, real)


def test_nothing_is_kept_of_no_gain_and_each_policy_needs_both_files(tmp_path: Path) -> None:
    drawn, real = _file(tmp_path / "d.jsonl", _DRAWN), _file(tmp_path / "r.jsonl", _REAL)
    with pytest.raises(InputError, match="nothing is gained"):
        kept([drawn, drawn], [real, real])
    with pytest.raises(InputError, match="as many results"):
        kept([drawn, drawn], [real])
