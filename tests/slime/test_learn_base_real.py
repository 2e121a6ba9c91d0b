"""`trainer learn base` on a CPU: rows of several questions, the weights that are kept, and the stage itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

POINT = {"kind": "point", "text": "Point at kite.", "point": [100, 50], "box": [60, 30, 80, 40]}
TRACE = {"kind": "sentence", "text": "Trace kite to rose.", "point": [100, 50], "box": [60, 30, 80, 40],
         "to": [300, 50], "to_box": [260, 30, 80, 40]}  # fmt: skip
LATER = {**POINT, "kind": "later", "text": "Spell rose; trace oak to elm; find kite.",
         "earlier": [{"reply": "rose"}, {"point": [100, 50], "to": [300, 50]}]}  # fmt: skip
ENDED = {"kind": "ended", "text": "Spell rose.", "earlier": [{"reply": "rose"}]}
READ = {"kind": "read_at", "text": "Read the text at {at}.", "reply": "lemon", "at": [256, 160]}


@pytest.fixture(scope="module")
def settings() -> Any:
    from trainer.learn.settings import SMOKE

    return SMOKE


@pytest.fixture(scope="module")
def policy(settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from trainer.learn.base import write_untrained
    from trainer.learn.policy import Policy

    directory = tmp_path_factory.mktemp("base") / "untrained"
    write_untrained(settings, directory, seed=0)
    return Policy(directory, device="cpu", image_px=settings.image_px)


@pytest.fixture(scope="module")
def questions(settings: Any, policy: Any) -> Any:
    from trainer.learn.screens import Questions

    return Questions(settings, policy.tokenizer, policy.processor)


def test_a_question_has_the_tokens_of_a_rollouts_first_turn(questions: Any, policy: Any) -> None:
    (prompt,) = questions.prompts([POINT])
    assert [*questions.beginning, *prompt] == questions.whole_prompt("Point at kite.")
    text = policy.tokenizer.decode(questions.beginning + prompt)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("Task: Point at kite.<|im_end|>\n<|im_start|>assistant\n")
    assert questions.text_of(READ) == "Read the text at [501, 502]."


def test_replies_are_those_of_the_policys_grammar(questions: Any, policy: Any) -> None:
    asked = [POINT, READ, TRACE, ENDED]
    replies = [ids[-length:] for ids, length in map(questions.row, asked)]
    texts = [policy.tokenizer.decode(ids) for ids in replies]
    assert '"action": "left_click", "coordinate": [196, 157]' in texts[0]
    assert '"action": "type", "text": "lemon"' in texts[1]
    assert '"action": "left_click_drag", "coordinate": [587, 157], "start_coordinate": [196, 157]' in texts[2]
    assert '"action": "terminate", "status": "success"' in texts[3]
    assert max(map(len, replies)) < 25, "constant texts are one token each"
    for question in asked:
        assert [questions.is_right(question, reply) for reply in replies] == [question is each for each in asked]
    point, read, trace, _ = replies
    assert not questions.is_right({**TRACE, "to_box": [261, 30, 10, 40]}, trace)
    assert not questions.is_right({**TRACE, "box": [261, 30, 80, 40]}, trace)
    assert not questions.is_right({**POINT, "box": [101, 30, 80, 40]}, point)
    assert not questions.is_right({**READ, "reply": "lemons"}, read)
    assert not questions.is_right(READ, read[:-1])


def test_a_later_part_has_the_tokens_of_a_later_turn(questions: Any, policy: Any) -> None:
    ids, length = questions.row(LATER)
    assert ids == [*questions.whole_prompt(str(LATER["text"]), LATER["earlier"]), *ids[-length:]]
    text = policy.tokenizer.decode([token for token in ids if token != policy.image_id])
    _, _, turns = text.partition("</tools>")
    roles = [part.partition("\n")[::2] for part in turns.split("<|im_start|>")[1:]]
    assert [role for role, _ in roles] == ["user", "assistant"] * 3
    said = [content.removesuffix("\n").removesuffix("<|im_end|>") for _, content in roles]
    dropped = "(An earlier look at the screen, no longer shown.)"
    assert said[0] == f"{dropped}\n\nTask: {LATER['text']}"
    assert '"type", "text": "rose"' in said[1]
    assert said[2] == f"Done. {dropped}"
    assert '"left_click_drag"' in said[3]
    assert said[4] == "<|vision_start|><|vision_end|>Done."
    assert '"left_click", "coordinate": [196, 157]' in said[5]


def test_joined_questions_have_the_logits_of_rows_of_their_own(settings: Any, policy: Any, questions: Any) -> None:
    import torch

    from trainer.learn.screens import packed

    width, height = settings.screen_px
    frame = torch.randint(0, 256, (height * width * 3,), generator=torch.Generator().manual_seed(0))
    screen = ([POINT, READ], bytes(frame.tolist()))
    rows = packed(questions, [screen], settings, pad_id=policy.pad_id)
    patches = policy.patches(rows["frames"])
    at = rows["is_trained"].nonzero(as_tuple=True)
    joined = policy.logits(
        rows["ids"].long(), patches, at, branch_BT=rows["branch"], place_BT=rows["place"].long()
    ).detach()
    own = []
    for ids, length in questions.branches([POINT, READ]):
        row = torch.tensor([[*questions.beginning, *ids]])
        columns = torch.arange(row.shape[1] - length, row.shape[1])
        own.append(policy.logits(row, patches, (torch.zeros_like(columns), columns)).detach())
    assert torch.allclose(joined, torch.cat(own), atol=1e-4)


@pytest.mark.parametrize("question", [LATER, ENDED])
def test_a_later_part_is_trained_as_a_row_of_its_own(question: Any, settings: Any, policy: Any, questions: Any) -> None:
    import torch

    from trainer.learn.base import screens_loss
    from trainer.learn.screens import packed

    width, height = settings.screen_px
    screens = [([question], bytes(height * width * 3))]
    wide = settings.model_copy(update={"base": settings.base.model_copy(update={"row_tokens": 720})})
    rows = packed(questions, screens, wide, pad_id=policy.pad_id)
    ids, length = questions.row(question)
    row = torch.tensor([ids])
    columns = torch.arange(len(ids) - length, len(ids))
    logits = policy.logits(row, policy.patches(rows["frames"]), (torch.zeros_like(columns), columns))
    loss, count = screens_loss(policy, rows)
    assert count == 1
    assert torch.isclose(loss, torch.nn.functional.cross_entropy(logits, row[0, columns]), atol=1e-4)
    narrow = settings.model_copy(update={"base": settings.base.model_copy(update={"row_tokens": len(ids) - 1})})
    loss, count = screens_loss(policy, packed(questions, screens, narrow, pad_id=policy.pad_id))
    assert (float(loss.detach()), count) == (0.0, 0), "it does not fit"


def test_packed_weights_are_read_nearly_as_they_were_with_new_pieces(policy: Any, tmp_path: Path) -> None:
    import torch

    from trainer.learn.checkpoint import is_packed, pack_checkpoint, unpack_checkpoint
    from trainer.learn.policy import Policy

    pack_checkpoint(policy.checkpoint, policy.model.state_dict(), tmp_path / "packed")
    assert is_packed(tmp_path / "packed")
    size = sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert size < 1.2 * sum(each.numel() for each in policy.model.state_dict().values())
    again = Policy(
        unpack_checkpoint(tmp_path / "packed", tmp_path / "model", pieces=["Another system message."]),
        device="cpu",
        image_px=policy.image_px,
    )
    assert len(again.tokenizer.encode("Another system message.")) == 1
    assert again.tokenizer.encode("Task: Point at kite.") == policy.tokenizer.encode("Task: Point at kite.")
    for name, weight in policy.model.state_dict().items():
        found = again.model.state_dict()[name][: len(weight)]
        assert torch.allclose(found, weight, atol=0.005 * float(weight.abs().max()) + 1e-6), name


def test_the_policy_of_a_stage_is_written_as_a_base(settings: Any, policy: Any, tmp_path: Path) -> None:
    import torch
    from typer.testing import CliRunner

    from tests.tools.learning.__main__ import app
    from trainer.learn.checkpoint import read_packed
    from trainer.learn.states import RunState, make_optimizer, save_state

    (tmp_path / "demos").mkdir()
    (tmp_path / "demos" / "model").symlink_to(policy.checkpoint)
    optimizer = make_optimizer(policy.model, learning_rate=1e-3)
    save_state(tmp_path / "rl-0", RunState.of(policy.model, optimizer, settings, stage="rl", done=1))
    written = CliRunner().invoke(app, ["pack", str(tmp_path / "rl-0"), str(tmp_path / "packed")])
    assert written.exit_code == 0, written.output
    found = read_packed(tmp_path / "packed")
    for name, weight in policy.model.state_dict().items():
        assert torch.allclose(found[name].float(), weight, atol=0.005 * float(weight.abs().max()) + 1e-6), name
    missing = CliRunner().invoke(app, ["pack", str(tmp_path / "demos"), str(tmp_path / "packed")])
    assert (missing.exit_code, "no saved policy" in missing.output) == (1, True)


def test_kept_weights_are_probed_without_training(settings: Any, policy: Any, tmp_path: Path) -> None:
    from trainer.learn.base import probe_checkpoint
    from trainer.learn.checkpoint import pack_checkpoint
    from trainer.learn.record import MetricsLog

    pack_checkpoint(policy.checkpoint, policy.model.state_dict(), tmp_path / "packed")
    with MetricsLog(tmp_path) as log:
        probe_checkpoint(settings, tmp_path / "packed", tmp_path, seed=3, log=log)
    found = json.loads((tmp_path / "probes.json").read_text())
    assert (found["checkpoint"], found["seed"]) == (str(tmp_path / "packed"), 3)
    counts = [each["count"] for name in ("unseen", "plain") for each in found[name].values()]
    assert counts
    assert max(counts) <= settings.base.probe_questions


def test_a_base_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    from trainer.learn import LearnError
    from trainer.learn.checkpoint import unpack_checkpoint

    (tmp_path / "packed.safetensors").write_bytes(b"cut off")
    with pytest.raises(LearnError, match=r"cannot be read: .*; train it again by the stage `base`"):
        unpack_checkpoint(tmp_path, tmp_path / "model")


@pytest.mark.parametrize("key", ["checkpoint", "start"])
def test_a_base_that_does_not_exist_is_named_with_its_setting(tmp_path: Path, key: str) -> None:
    (tmp_path / "base.yaml").write_text(f"base: {{{key}: {tmp_path / 'nothing'}}}\n")
    command = [sys.executable, "-m", "trainer", "learn", "base", "--smoke", "--run", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [*command, "--config", str(tmp_path / "base.yaml")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ran.returncode == 1
    assert f"base.{key} {tmp_path / 'nothing'}: no base is there; name a directory" in " ".join(ran.stderr.split())


def take_all(source: Any) -> None:
    while True:
        source.batch()


def test_processes_that_end_are_an_error(settings: Any, policy: Any) -> None:
    from trainer.learn import LearnError
    from trainer.learn.screens import RowSource, read_screens

    with pytest.raises(LearnError, match=r"envd.drawn.screens: it ended"):
        next(read_screens(settings, 0, "--unknown"))
    with RowSource(settings, policy.checkpoint, policy.device, seed=0) as source:
        assert len(source.batch()["ids"]) == settings.base.screens
        source._processes[0].kill()
        with pytest.raises(LearnError, match="a process that draws ended"):
            take_all(source)


def prompts_of_demos(run: Path) -> None:
    """Check that a demonstrated reply follows the tokens that a question with the same earlier replies has."""
    from trainer.learn.demos import read_rows
    from trainer.learn.screens import Questions, read_tokenizer
    from trainer.learn.settings import SMOKE

    tokenizer, processor = read_tokenizer(run / "demos" / "model")
    questions, rows, found = Questions(SMOKE, tokenizer, processor), read_rows(run / "demos"), 0
    for index in range(len(rows)):
        ids = [int(token) for token in rows.row(index)]
        text = tokenizer.decode(ids)
        earlier = re.findall(r'"type", "text": "(\w+)"', text.rpartition("<|vision_start|>")[0])
        points = re.findall(r'"left_click", "coordinate": \[(\d+), (\d+)\]', text.rpartition("<|vision_start|>")[0])
        if len(earlier) == len(points) == 1:
            x, y = questions._space.to_screen(*map(int, points[0]))
            task = re.findall(r"Task: (.*)<\|im_end\|>", text)[0]
            asked = questions.whole_prompt(task, [{"point": [x, y]}, {"reply": earlier[0]}])
            assert ids[: len(asked)] == asked
            found += 1
    assert found


@pytest.mark.long
def test_the_stage_runs_resumes_and_starts_the_demonstrations(tmp_path: Path) -> None:
    import torch

    from trainer.learn.checkpoint import read_packed

    run = tmp_path / "run"

    def learn(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "trainer", "learn", "--smoke", "--run", str(run), *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    done = learn("base")
    assert done.returncode == 0, done.stderr[-3000:]
    probes = json.loads((run / "base" / "probes.json").read_text())
    assert probes["step"] == 6
    assert probes["unseen"]["point"]["count"] == 2
    again = learn("base")
    assert (again.returncode, "add --resume" in again.stderr) == (1, True)
    more = tmp_path / "more.yaml"
    more.write_text("base: {steps: 7}\n")
    resumed = learn("base", "--resume", "--config", str(more))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert json.loads((run / "base" / "probes.json").read_text())["step"] == 7
    further = tmp_path / "further.yaml"
    further.write_text(f"base: {{start: {run / 'base' / 'model'}, steps: 1, learning_rate: 0.000001}}\n")
    started = learn("base", "--config", str(further), "--run", str(tmp_path / "further"))
    assert started.returncode == 0, started.stderr[-3000:]
    before, after = (read_packed(directory / "base" / "model") for directory in (run, tmp_path / "further"))
    assert all(torch.allclose(before[name], after[name], atol=0.02) for name in before), "other weights"
    cloned = learn("demos")
    assert cloned.returncode == 0, cloned.stderr[-3000:]
    prompts_of_demos(run)
    assert "cloning will start from" in cloned.stderr
    keeps = tmp_path / "keeps.yaml"
    keeps.write_text("clone: {keeps_reading: true}\n")
    cloned = learn("clone", "--config", str(keeps))
    assert cloned.returncode == 0, cloned.stderr[-3000:]
    lines = [json.loads(line) for line in (run / "clone" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "clone"]
    assert steps
    assert all(step["screens_loss"] > 0 for step in steps)


STEP_OF_TWO = """
import sys, torch
from trainer.learn.base import _agreed, _process_group
from trainer.learn.states import train_step

with _process_group("cpu") as (_, rank):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    loss = model(torch.tensor([[1.0, 0.0]] if rank else [[0.0, 1.0]])).sum() * (1 + rank) / 10
    norm = train_step(model, torch.optim.SGD(model.parameters()), loss, learning_rate=1.0, what="a step")
    agreed = _agreed(5.0 + rank, 3 + rank, torch.device("cpu"))
    with open(f"{sys.argv[1]}/{rank}", "w") as file:
        print([round(value, 4) for value in [norm, *model.weight[0].tolist(), *agreed]], file=file)
"""


def starting_two(directory: Path, *command: str) -> "subprocess.Popen[str]":
    """Start a program twice, as torchrun does on a host with two GPUs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, env=environment, cwd=directory)


def by_two(directory: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a program twice until both have ended."""
    with starting_two(directory, *command) as torchrun:
        _, messages = torchrun.communicate()
    return subprocess.CompletedProcess(command, torchrun.returncode, "", messages)


def test_processes_of_torchrun_take_the_mean_step(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(STEP_OF_TWO)
    done = by_two(tmp_path, "step.py", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / name).read_text()) for name in "01"]
    # Gradients (0, 0.1) and (0.2, 0); the seconds of rank 0, the sum of the counts.
    assert found == [[0.1118, 0.9, 0.95, 5.0, 7]] * 2


LEAVING_ONE = """
import os, signal, sys, torch
from trainer.learn.base import _process_group
from trainer.learn.states import ProcessLost, train_step

with _process_group("cpu") as (_, rank):
    if rank:
        os.kill(os.getpid(), signal.SIGINT)
        open(f"{sys.argv[1]}/outlives-an-interruption", "w").close()
        os._exit(0)
    model = torch.nn.Linear(2, 1)
    before = model.weight.tolist()
    try:
        train_step(model, torch.optim.SGD(model.parameters()), model(torch.ones(2)), learning_rate=1.0, what="a step")
    except ProcessLost:
        with open(f"{sys.argv[1]}/lost", "w") as file:
            print(model.weight.tolist() == before, file=file)
"""


def test_a_process_that_leaves_is_an_error_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(LEAVING_ONE)
    done = by_two(tmp_path, "step.py", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "outlives-an-interruption").exists()
    assert (tmp_path / "lost").read_text() == "True\n"


@pytest.mark.long
def test_a_killed_process_of_torchrun_costs_no_step(tmp_path: Path) -> None:
    import torch

    more, base = tmp_path / "more.yaml", tmp_path / "run" / "base"
    more.write_text("base: {steps: 100000, save_every_s: 100000}\n")
    words = ("trainer", "learn", "base", "--smoke", "--config", str(more), "--run", str(tmp_path / "run"))
    with starting_two(tmp_path, "--module", "--", *words) as torchrun:
        while not (base / "metrics.jsonl").exists() or '"step": 1' not in (base / "metrics.jsonl").read_text():
            assert torchrun.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        last = max(map(int, children))
        # The other waits for it in a step, or soon will.
        os.kill(last, signal.SIGSTOP)
        os.kill(last, signal.SIGKILL)
        _, messages = torchrun.communicate()
    assert torchrun.returncode == 1, messages[-3000:]
    state = torch.load(base / "state.pt", weights_only=True)
    assert state["done"] >= 1
    assert (base / "model" / "packed.safetensors").is_file()


@pytest.mark.long
def test_two_processes_of_torchrun_train_one_base(tmp_path: Path) -> None:
    words = ("trainer", "learn", "base", "--smoke", "--run", str(tmp_path / "run"))
    done = by_two(tmp_path, "--module", "--", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    base = tmp_path / "run" / "base"
    probes = json.loads((base / "probes.json").read_text())
    logged = [json.loads(line) for line in (base / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in logged if line["stage"] == "base"]
    # One of them logs.
    assert (steps[-1], len(set(steps))) == (6, len(steps))
    assert probes["step"] == 6
    assert (base / "model" / "packed.safetensors").is_file()
