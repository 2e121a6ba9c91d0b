"""Rows of a user's data file that cannot be played: named at the start, void, and never the end of a job."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuaenv.client import Done
from tests.support.counting import AGENT, PARAMS, SAY, TASK
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import Sample, ScriptedEngine, rollout_metrics, stand_in_args, stand_in_slime
from trainer.config import InputError
from trainer.slime import job as registry
from trainer.slime import slime_compat
from trainer.slime.hooks import data_source, generate
from trainer.slime.play.samples import facts_of

CHAT = [{"role": "user", "content": "Count."}]
GOOD: dict[str, Any] = {"prompt": CHAT, "metadata": {"task_id": TASK}}


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_jobs", {})


def written(directory: Path, *rows: Any) -> str:
    path = directory / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def job(file: str, server: FakeServer | None = None, **changed: Any) -> Any:
    envd = {
        "hosts": [server.address if server else "unused:1"],
        "engine_timeout_s": 20.0,
        "agent": AGENT,
        "halt": {"above": {}},
        "max_lost_groups": 0,
    }
    columns = {"input_key": "prompt", "label_key": None, "metadata_key": "metadata"}
    return stand_in_args(envd, **{"n_samples_per_prompt": 1, "prompt_data": file, **columns, **changed})


async def played(args: Any, metadata: Any, **given: Any) -> Any:
    return await generate(args, Sample(index=0, group_index=0, metadata=metadata, **given), PARAMS)


async def test_rows_that_cannot_be_played_are_named_once_and_their_samples_are_void(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad: list[tuple[Any, str]] = [
        (json.dumps({"task_id": TASK}), "metadata is a str; write an object"),
        ([TASK], "metadata is a list; write an object"),
        ({"task": TASK}, "no task id; add task_id"),
        ({"task_id": 7}, "no task id"),
        ({"task_id": TASK, "checkpoint": "ckpt-1"}, "column checkpoint is not one of `trainer data states`"),
    ]
    async with serve_fake(size=1, capacity=2) as server:
        with stand_in_slime(ScriptedEngine(lambda _: SAY([Done()]))):
            file = written(tmp_path, GOOD, *({"prompt": CHAT, "metadata": metadata} for metadata, _ in bad))
            args = job(file, server)
            for metadata, problem in bad:
                sample = await played(args, metadata)
                facts = facts_of(sample)
                assert (facts["void"], facts["owner"], sample.status.name) == ("UnplayableRow", "caller", "FAILED")
                assert problem in facts["error"]
                assert rollout_metrics(args, [sample])["void/UnplayableRow"] == 1
            sample = await played(args, {"task_id": TASK})
            assert sample.status.name == "COMPLETED"
    (warning,) = [record.getMessage() for record in caplog.records if "[envd] data" in record.getMessage()]
    assert f"{file}: samples of 5 of 6 rows are void: row 2: metadata is a str" in warning
    for number, (_, problem) in enumerate(bad, start=2):
        assert f"row {number}: " in warning
        assert problem in warning


async def test_tasks_that_no_host_has_are_named_with_the_nearest_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [f"{TASK} ", "Fake/Count-To-Five", "other/task", TASK]
    file = written(tmp_path, *({"prompt": CHAT, "metadata": {"task_id": each}} for each in ids))
    async with serve_fake(size=1, capacity=2) as server:
        with stand_in_slime(ScriptedEngine(lambda _: SAY([Done()]))):
            await played(job(file, server), {"task_id": TASK})
    assert f"row 1: task '{TASK} ': no host has it; did you mean {TASK}?" in caplog.text
    assert f"row 2: task 'Fake/Count-To-Five': no host has it; did you mean {TASK}?" in caplog.text
    assert "row 3: task 'other/task': no host has it" in caplog.text
    assert "samples of 3 of 4 rows are void" in caplog.text


async def test_data_are_checked_when_a_host_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, {"prompt": CHAT, "metadata": {"task_id": "other/task"}})
    async with serve_fake(size=1, capacity=2) as server:
        with stand_in_slime(ScriptedEngine(lambda _: SAY([Done()]))):
            args = job(file, server)
            listing = server.service.tasks.list
            server.service.tasks.list = lambda: 1 / 0  # type: ignore[method-assign,return-value,assignment]
            await played(args, {"task_id": TASK})
            assert "no host has it" not in caplog.text
            server.service.tasks.list = listing  # type: ignore[method-assign]
            await played(args, {"task_id": TASK})
    assert "no host has it" in caplog.text


async def test_a_file_without_a_playable_row_ends_the_job_before_an_episode(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": CHAT, "metadata": "x"}, {"prompt": CHAT})
    async with serve_fake(size=1, capacity=2) as server:
        with (
            stand_in_slime(ScriptedEngine(lambda _: "")),
            pytest.raises(InputError, match="no row can be played: row 1"),
        ):
            await played(job(file, server), {"task_id": TASK})
        assert not server.hypervisor.machines or all(
            machine.input_count == 0 for machine in server.hypervisor.machines.values()
        )


@pytest.mark.parametrize(
    ("row", "changed", "problem"),
    [
        ({"metadata": {"task_id": TASK}}, {}, r"row 2: no prompt \(--input-key\)"),
        ({**GOOD, "prompt": "Count."}, {"apply_chat_template": False}, "row 2: prompt is a text; write a list"),
        (GOOD, {"label_key": "label"}, r"row 1: no label \(--label-key\)"),
        (["Count."], {}, "row 2 is a list; write an object"),
    ],
)
def test_rows_that_slime_cannot_read_are_refused_by_file_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Any, changed: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr(slime_compat, "data_source", lambda args: pytest.fail("slime reads it"))
    with stand_in_slime(ScriptedEngine(lambda _: "")), pytest.raises(InputError, match=problem):
        data_source(job(written(tmp_path, GOOD, row), **changed))


def test_rows_of_evaluations_are_checked_and_those_of_other_environments_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SimpleNamespace(save=None, load=None)
    monkeypatch.setattr(slime_compat, "data_source", lambda args: source)
    evaluated = SimpleNamespace(
        path=written(tmp_path, {"prompt": CHAT}),
        input_key="prompt",
        label_key=None,
        metadata_key="metadata",
        apply_chat_template=None,
        multimodal_keys=None,
        custom_generate_function_path=None,
    )
    with stand_in_slime(ScriptedEngine(lambda _: "")):
        args = job("", eval_datasets=[evaluated])
        with pytest.raises(InputError, match="no row can be played: row 1: no task id"):
            data_source(args)
        evaluated.custom_generate_function_path = "mine.generate"
        assert data_source(args) is source
