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

_DRAWN = {f"drawn/press?seed={seed}": 0.0 for seed in range(20)}
_DRAWN |= {f"drawn/close-tick?seed={seed}": 1.0 for seed in range(10)}
_REAL = {f"widgets/press-{seed}": 0.0 for seed in range(20)} | {f"widgets/close-tick-{seed}": 0.0 for seed in range(10)}


def _solving(scores: Mapping[str, float], template: str, count: int) -> dict[str, float]:
    """Return the scores with the first tasks of a template solved."""
    chosen = [task_id for task_id in scores if template in task_id][:count]
    return {**scores, **dict.fromkeys(chosen, 1.0)}


def _file(path: Path, scores: Mapping[str, float | None], *, prompt_hash: str = "p") -> Path:
    run = Run(label=path.stem, settings={"model": path.stem[1:]}, prompt_hash=prompt_hash)
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
        _file(tmp_path / "d1.jsonl", _solving(_DRAWN, "press", 20)),
        _file(tmp_path / "d2.jsonl", _solving(_DRAWN, "press", 15)),
    ]
    real = [
        _file(tmp_path / "r0.jsonl", _REAL),
        _file(tmp_path / "r1.jsonl", _solving(_REAL, "press", 10)),
        _file(tmp_path / "r2.jsonl", {**_solving(_REAL, "press", 15), "widgets/close-tick-1": 0.5}),
    ]
    arguments = [text for path in drawn for text in ("--drawn", str(path))]
    arguments += [text for path in real for text in ("--real", str(path))]
    printed = CliRunner().invoke(app, ["kept", *arguments])
    assert printed.exit_code == 0, printed.output
    found = json.loads(printed.stdout)
    assert found["drawn"]["templates"] == {"close-tick": [10, 10, 10], "press": [0, 20, 15]}
    assert (found["drawn"]["before"]["rate"], found["drawn"]["after"]["right"]) == (0.3333, 55)
    assert [each["right"] for each in found["real"]["after_by_policy"]] == [10, 15], "partial credit is not a success"
    assert [found["kept"]["share"], *(each["share"] for each in found["kept_by_policy"])] == [0.714, 0.5, 1.0]
    low, high = found["kept_by_policy"][0]["ci95"]
    assert low < 0.4
    assert high > 0.6
    assert found["kept_by_policy"][1]["ci95"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"widgets/press-2": None}, "press-2 needs one attempt with a score"),
        ({"widgets/press-02": 1.0}, "press-2 needs one attempt with a score"),
        ({"widgets/press-33": 1.0}, "has other tasks than"),
        ({"widgets/plain": 1.0}, "'widgets/plain' is not a task of this side"),
        ({"drawn/press?seed=2": 1.0}, "'drawn/press.seed=2' is not a task of this side"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, changed: Mapping[str, float | None], message: str) -> None:
    drawn = [_file(tmp_path / "d0.jsonl", _DRAWN), _file(tmp_path / "d1.jsonl", dict.fromkeys(_DRAWN, 1.0))]
    real = [_file(tmp_path / "r0.jsonl", _REAL), _file(tmp_path / "r1.jsonl", {**_REAL, **changed})]
    with pytest.raises(InputError, match=message):
        kept(drawn, real)


def test_files_of_other_policies_or_agents_and_empty_ones_are_refused(tmp_path: Path) -> None:
    drawn = [_file(tmp_path / "d0.jsonl", _DRAWN), _file(tmp_path / "d1.jsonl", dict.fromkeys(_DRAWN, 1.0))]
    real = [_file(tmp_path / "r0.jsonl", _REAL), _file(tmp_path / "r1.jsonl", _REAL, prompt_hash="q")]
    with pytest.raises(InputError, match="is of an agent with another prompt"):
        kept(drawn, real)
    with pytest.raises(InputError, match="are of two models"):
        kept(drawn, real[::-1])
    empty = [_file(tmp_path / f"{name}.jsonl", {}) for name in ("d0", "d1", "r0", "r1")]
    with pytest.raises(InputError, match="has no attempt"):
        kept(empty[:2], empty[2:])


def test_nothing_is_kept_of_no_gain_and_each_policy_needs_both_files(tmp_path: Path) -> None:
    drawn, real = _file(tmp_path / "d0.jsonl", _DRAWN), _file(tmp_path / "r0.jsonl", _REAL)
    printed = CliRunner().invoke(app, ["kept", *("--drawn", str(drawn)) * 2, *("--real", str(real)) * 2])
    assert (printed.exit_code, "nothing is gained" in printed.output) == (1, True)
    with pytest.raises(InputError, match="as many results"):
        kept([drawn, drawn], [real])


def test_a_policy_without_a_gain_has_no_share_of_its_own(tmp_path: Path) -> None:
    worse = {**_DRAWN, "drawn/close-tick?seed=1": 0.0}
    drawn = [
        _file(tmp_path / "d0.jsonl", _DRAWN),
        _file(tmp_path / "d1.jsonl", _solving(_DRAWN, "press", 20)),
        _file(tmp_path / "d2.jsonl", worse),
    ]
    real = [_file(tmp_path / f"r{number}.jsonl", _REAL) for number in range(3)]
    found = kept(drawn, real)
    assert found["kept_by_policy"][1] is None
    assert found["drawn"]["after"]["right"] == 39
