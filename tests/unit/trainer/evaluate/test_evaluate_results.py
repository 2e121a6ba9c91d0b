"""Results files, summaries and comparisons of evaluations."""

from pathlib import Path

import pytest

from trainer.config import InputError
from trainer.evaluate.comparison import compare
from trainer.evaluate.results import Attempt, Results, ResultsFile, Run
from trainer.evaluate.statistics import wilson
from trainer.evaluate.summary import summarise

RUN = Run(label="base", settings={"model": "m", "temperature": 0.0}, prompt_hash="p1")


def attempt(
    name: str, score: float | None, *, seed: int = 0, level: int = 1, domain: str = "files", infeasible: bool = False
) -> Attempt:
    return Attempt(
        task_id=f"desktop/{name}",
        suite="desktop",
        level=level,
        domain=domain,
        infeasible=infeasible,
        seed=seed,
        outcome="failed" if score is None else "terminated",
        reason="MachineLost" if score is None else "done",
        score=score,
        turn_count=4,
        parsed_count=3,
    )


def write(path: Path, *attempts: Attempt, run: Run = RUN) -> None:
    with ResultsFile(path, run) as file:
        for one in attempts:
            file.add(one)


def test_an_evaluation_continues_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "out" / "base.jsonl"
    write(path, attempt("a", 1.0))
    with ResultsFile(path, RUN) as file:
        assert file.results.is_settled("desktop/a", 0)
        assert not file.results.is_settled("desktop/a", 1)
        file.add(attempt("b", 0.0))
    assert [one.task_id for one in Results.read(path).attempts] == ["desktop/a", "desktop/b"]


def test_a_lost_attempt_is_repeated_and_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    write(path, attempt("a", None))
    assert not Results.read(path).is_settled("desktop/a", 0)
    write(path, attempt("a", 1.0))
    assert [one.score for one in Results.read(path).attempts] == [1.0]


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    write(path, attempt("a", 1.0))
    with path.open("ab") as file:
        file.write(b'{"kind": "attempt", "task_id": "desk')
    write(path, attempt("b", 0.5))
    assert len(Results.read(path).attempts) == 2


def test_results_of_another_evaluation_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    write(path, attempt("a", 1.0))
    before = path.read_bytes()
    other = Run(label="base", settings={"model": "m", "temperature": 0.7}, prompt_hash="p1")
    with pytest.raises(InputError, match=r"temperature: 0\.0 in the file, 0\.7 now"):
        ResultsFile(path, other)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("there", "now", "problem"),
    [
        ({"s/a": 1, "s/b": 1}, {"s/a": 1}, r"\(s/b: only in the file\)"),
        ({"s/a": 1}, {"s/a": 1, "s/b": 1, "s/c": 1}, r"\(s/b: not in the file\)"),
        ({"s/a": 1}, {"s/a": 2}, r"\(task_versions.s/a: 1 in the file, 2 now\)"),
    ],
)
def test_results_of_other_tasks_are_refused_and_one_is_named(
    tmp_path: Path, there: dict[str, int], now: dict[str, int], problem: str
) -> None:
    def run_of(tasks: dict[str, int]) -> Run:
        return RUN.model_copy(update={"settings": {**RUN.settings, "task_versions": tasks}})

    with ResultsFile(tmp_path / "base.jsonl", run_of(there)):
        pass
    with pytest.raises(InputError, match=problem):
        ResultsFile(tmp_path / "base.jsonl", run_of(now))


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    with ResultsFile(path, RUN), pytest.raises(InputError, match="another process"):
        ResultsFile(path, RUN)
    with ResultsFile(path, RUN):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "do not start with"),
        ('{"kind": "attempt"}\n', "attempt.task_id: is missing"),
        ("not json\n", "1 is not a line of results"),
        (RUN.model_dump_json()[:-1] + ', "speed": 9}\n', "run.speed: unknown key"),
        (2 * (RUN.model_dump_json() + "\n"), ":2 starts another evaluation"),
    ],
)
def test_an_invalid_results_file_is_refused_with_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        Results.read(path)


def test_errors_are_counted_separately_and_enter_no_rate() -> None:
    summary = summarise(Results(RUN, [attempt("a", 1.0), attempt("b", 0.0), attempt("c", None)]))
    every = summary.rows[0]
    assert (every.group, every.task_count, every.attempt_count, every.error_count) == ("all", 2, 2, 1)
    assert every.success == wilson(1, 2)
    assert summary.errors == {"MachineLost": 1}
    assert summary.endings == {"done": 2}
    assert summary.parsed_share == 0.75


def test_lost_attempts_are_failures_in_the_second_rate() -> None:
    undecided = attempt("c", None).model_copy(update={"owner": "undecided"})
    again = attempt("a", 1.0).model_copy(update={"attempt_count": 2})
    escaped = attempt("b", 0.0).model_copy(update={"guest_end_cause": "POWER_OFF"})
    summary = summarise(Results(RUN, [again, escaped, undecided, attempt("d", None)]))
    assert summary.rows[0].success == wilson(1, 2)
    assert summary.rows[0].success_with_lost == wilson(1, 4)
    assert (summary.repeated_count, summary.undecided_count, summary.ended_by_guest_count) == (1, 1, 1)


def test_an_attempt_that_the_agent_may_have_lost_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    lost = attempt("a", None)
    write(path, lost.model_copy(update={"owner": "undecided"}), lost.model_copy(update={"owner": "host", "seed": 1}))
    results = Results.read(path)
    assert [results.is_settled("desktop/a", seed) for seed in (0, 1)] == [True, False]


def test_partial_credit_is_a_score_but_not_a_success() -> None:
    row = summarise(Results(RUN, [attempt("a", 0.5)])).rows[0]
    assert row.success is not None
    assert row.score is not None
    assert (row.success.mean, row.score.mean) == (0.0, 0.5)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_mean_of_equal_scores_has_an_interval(score: float) -> None:
    row = summarise(Results(RUN, [attempt(name, score) for name in "abcdefgh"])).rows[0]
    assert row.score == row.success == wilson(8 * score, 8)


def test_infeasible_tasks_have_their_own_row() -> None:
    runs = [attempt("a", 0.0), attempt("b", 0.0), attempt("c", 0.0), attempt("no", 1.0, infeasible=True)]
    summary = summarise(Results(RUN, runs))
    rates = {row.group: row.success.mean for row in summary.rows if row.success}
    assert rates == {"all": 0.25, "feasible": 0.0, "infeasible": 1.0}
    assert summary.infeasible_share == 0.25


def test_levels_and_domains_have_rows_where_there_are_several() -> None:
    runs = [attempt("a", 1.0), attempt("b", 0.0, level=2), attempt("c", 1.0, domain="panel")]
    groups = [row.group for row in summarise(Results(RUN, runs)).rows]
    assert groups == ["all", "domain files", "domain panel", "level 1", "level 2"]


def test_a_run_with_only_errors_has_no_rate() -> None:
    summary = summarise(Results(RUN, [attempt("a", None)]))
    assert summary.rows[0].success is None
    assert summary.parsed_share is None


def test_two_runs_are_compared_task_by_task() -> None:
    before = Results(RUN, [attempt(name, 0.0) for name in "abcdef"] + [attempt("g", 1.0), attempt("x", 1.0)])
    run = RUN.model_copy(update={"label": "tuned", "settings": {"model": "n", "temperature": 0.0}})
    after = Results(run, [attempt(name, 1.0) for name in "abcdef"] + [attempt("g", 1.0), attempt("y", 1.0)])
    comparison = compare(before, after)
    row = comparison.rows[0]
    assert (row.task_count, row.gained, row.lost) == (7, 6, 0)
    assert row.difference.mean == pytest.approx(6 / 7)
    assert row.difference.low > 0.3
    assert row.p_value == pytest.approx(2 / 64)
    assert comparison.unpaired == ["desktop/x", "desktop/y"]
    assert comparison.warnings == []


def test_runs_with_different_settings_are_compared_with_a_warning() -> None:
    other = Run(label="other", settings={"model": "m", "temperature": 1.0}, prompt_hash="p2")
    comparison = compare(Results(RUN, [attempt("a", 1.0)]), Results(other, [attempt("a", 0.0), attempt("b", None)]))
    assert [warning.split(",")[0] for warning in comparison.warnings] == [
        "the prompts differ",
        "the runs differ in temperature",
        "other: 1 attempts were lost to errors; repeat its evaluation",
    ]


def test_several_seeds_have_no_p_value() -> None:
    seeds = [attempt("a", float(seed > 0), seed=seed) for seed in range(3)]
    assert compare(Results(RUN, seeds), Results(RUN, seeds)).rows[0].p_value is None


def test_runs_without_a_common_task_have_no_rows() -> None:
    assert compare(Results(RUN, [attempt("a", 1.0)]), Results(RUN, [attempt("b", 1.0)])).rows == []


def test_tasks_that_changed_in_between_are_not_compared_unless_wanted() -> None:
    old, new = (replace_basis(attempt("a", 1.0), digest) for digest in ("1" * 64, "2" * 64))
    same = replace_basis(attempt("b", 1.0), "1" * 64)
    before, after = Results(RUN, [old, same]), Results(RUN, [new, same])
    with pytest.raises(InputError, match="the scores of desktop/a cannot be compared"):
        compare(before, after)
    allowed = compare(before, after, allow_unlike=True)
    assert allowed.rows[0].task_count == 2
    assert "1 tasks have changed in between" in allowed.warnings


def test_results_of_earlier_versions_have_no_digest_and_are_compared() -> None:
    old, new = attempt("a", 1.0), replace_basis(attempt("a", 1.0), "2" * 64)
    assert compare(Results(RUN, [old]), Results(RUN, [new])).rows[0].task_count == 1


def replace_basis(one: Attempt, digest: str) -> Attempt:
    return one.model_copy(update={"basis_digest": digest})
