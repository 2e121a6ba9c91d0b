"""TRL's own GRPOTrainer on drawn desktops: a tiny random vision model on the CPU, groups, scores and void rollouts."""

import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template

from cuaenv.action_codec import BadAction
from cuaenv.client import EpisodeEnded, TaskNotFound, Unauthenticated, View
from tests.support.desktops import DrawnDesktops
from trainer.adapters.session import SessionSettings, SessionVoid
from trainer.adapters.trl import DesktopEnvironment
from trainer.learn.checkpoint import write_checkpoint

# Warnings of the frameworks are not ours.
pytestmark = pytest.mark.filterwarnings("default")
ROW = {"prompt": [{"role": "user", "content": "Use the desktop.\n"}], "task_id": "fake/enable", "group": "g0"}
SECOND = timedelta(seconds=1)
SMALL = View(max_width_px=320)
#: The box Enabled, in the small picture.
BOX = {"x": 205, "y": 42}


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


SOLVE = [call("click", **BOX) + "\n" + call("done"), "Done."]


class Replies:
    """Replaces sampling until its replies are used up. All other computations use the model."""

    def __init__(self, trainer: GRPOTrainer, replies: Sequence[Sequence[str]], before: Callable[[int], None]) -> None:
        self._tokenizer = trainer.processing_class.tokenizer
        self._replies = [list(each) for each in replies]
        self._sample = trainer.model.generate
        self._before = before
        self._turn = 0
        trainer.model.generate = self

    def __call__(self, *, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        turn = [each.pop(0) for each in self._replies if each]
        if not turn:
            return self._sample(input_ids=input_ids, **options)
        self._before(self._turn)
        self._turn += 1
        ids = [self._tokenizer(reply + "<|im_end|>", add_special_tokens=False)["input_ids"] for reply in turn]
        length = max(map(len, ids))
        padded = [each + [self._tokenizer.pad_token_id] * (length - len(each)) for each in ids]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = [get_json_schema(getattr(DesktopEnvironment, name)) for name in ("click", "drag", "scroll", "done")]
    return write_checkpoint(tmp_path_factory.mktemp("model"), vocabulary=[json.dumps(tools)] * 3)


class _MarksImages:
    """Returns the types of tokens, as transformers' own processor of Qwen3-VL does."""

    def __call__(self, **options: Any) -> dict[str, Any]:
        encoded: dict[str, Any] = super().__call__(**options)  # type: ignore[misc]
        image = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")  # type: ignore[attr-defined]
        ids = encoded["input_ids"]
        if isinstance(ids, torch.Tensor):
            return encoded | {"mm_token_type_ids": (ids == image).long()}
        return encoded | {"mm_token_type_ids": [[int(token == image) for token in each] for each in ids]}


def trainer_of(
    desktops: DrawnDesktops, checkpoint: Path, directory: Path, *, row: dict[str, Any] = ROW, steps: int = 1
) -> GRPOTrainer:
    settings = SessionSettings.connect(desktops.address, view=SMALL, group_size=4)
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
    processor.__class__ = type("Processor", (_MarksImages, type(processor)), {})
    processor.chat_template = qwen3_vl_chat_template
    return GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(checkpoint),
        processing_class=processor,
        train_dataset=Dataset.from_list([row]),
        environment_factory=partial(DesktopEnvironment, settings),
        args=GRPOConfig(
            output_dir=str(directory),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=2000,
            generation_kwargs={"max_new_tokens": 16},
            learning_rate=1e-3,
        ),
    )


class Seen(TrainerCallback):  # type: ignore[misc]
    """Notes what TRL logs of the latest step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._logs = trainer._logs
        self.rewards: list[list[float]] = []
        self.advantages: list[list[float]] = []
        self.sizes: list[list[list[tuple[int, int]]]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.rewards.append(list(self._logs["rewards"]["DesktopEnvironment"]))
        self.advantages.append(list(self._logs["advantages"]))
        self.sizes.append([[picture.size for picture in pictures] for pictures in self._logs["images"]])


def weights_of(trainer: GRPOTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def episodes_of(trainer: GRPOTrainer) -> list[Any]:
    return [each._session.episode for each in trainer._environment_pool[None]]


def test_two_optimiser_steps_with_a_solved_a_null_and_a_lost_rollout(
    desktops: DrawnDesktops, checkpoint: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(desktops, checkpoint, tmp_path, steps=2)
    before = weights_of(trainer)
    groups = []

    def kill_the_third(turn: int) -> None:
        groups.append({episode.group_id for episode in episodes_of(trainer)})
        if turn == 1:
            # The machines of the solved rollouts were released when they were done.
            assert desktops.leased_count == 2
            desktops.kill_used_machines()

    lost = [call("click", **BOX), call("done"), "It did not work."]
    Replies(trainer, [SOLVE, ["I give up."], lost, SOLVE], kill_the_third)
    seen = Seen(trainer)
    trainer.add_callback(seen)
    # The second step samples from the weights themselves.
    trainer.train()

    rewards = seen.rewards[0]
    assert math.isnan(rewards.pop(2))
    assert rewards == [1.0, 0.0, 1.0]
    assert seen.rewards[1] == [0.0] * 4
    solved, null, void, other = seen.advantages[0]
    assert solved == other > 0 > null
    assert void == 0
    # Not lowered by the void rollout.
    assert trainer.state.log_history[0]["reward"] == pytest.approx(2 / 3)
    assert trainer.state.global_step == 2
    assert any(not torch.equal(old, new) for old, new in zip(before, weights_of(trainer), strict=True))
    assert len(groups[0]) == 1
    assert groups[0].isdisjoint(episode.group_id for episode in episodes_of(trainer))
    # The screenshots of prompt and tools reached the model.
    assert seen.sizes[0] == [[(320, 200)] * 2, [(320, 200)], [(320, 200)] * 2, [(320, 200)] * 2]
    assert seen.sizes[1] == [[(320, 200)]] * 4


@pytest.fixture
def on_this_cpu(desktops: DrawnDesktops, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make examples train the tiny model."""

    class Tiny(GRPOTrainer):  # type: ignore[misc]
        def __init__(self, model: str, **options: Any) -> None:
            processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
            processor.__class__ = type("Processor", (_MarksImages, type(processor)), {})
            processor.chat_template = qwen3_vl_chat_template
            tiny = AutoModelForImageTextToText.from_pretrained(checkpoint)
            super().__init__(model=tiny, processing_class=processor, **options)

    options = {"use_cpu": True, "bf16": False, "report_to": [], "generation_kwargs": {"max_new_tokens": 8}}
    monkeypatch.setattr("trl.GRPOTrainer", Tiny)
    monkeypatch.setattr("trl.GRPOConfig", partial(GRPOConfig, **options))
    monkeypatch.setenv("ENVD_TARGET", desktops.address)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("on_this_cpu")
def test_the_example_of_the_docs(example: Callable[[str], str]) -> None:
    names: dict[str, Any] = {}
    exec(example("TRL"), names)  # noqa: S102 -- our own page
    assert list(names["trainer"]._logs["rewards"]["DesktopEnvironment"]) == [0.0] * 4


@pytest.mark.parametrize(
    ("row", "error"), [({"task_id": "fake/none"}, TaskNotFound), ({"task_id": ""}, ValueError)], ids=["unknown", "none"]
)
def test_a_wrong_row_stops_the_training(
    desktops: DrawnDesktops, checkpoint: Path, tmp_path: Path, row: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        trainer_of(desktops, checkpoint, tmp_path, row=ROW | row).train()


def test_mistakes_of_the_model_are_text_and_harm_nothing(
    desktops: DrawnDesktops, checkpoint: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(desktops, checkpoint, tmp_path)
    wrong = [
        call("click", x="left", y=2) + call("click", x=1) + call("fly") + call("press_keys", keys=["no-such-key"]),
        call("click", **BOX) + call("done") + call("click", **BOX),
        "Done.",
    ]
    Replies(trainer, [wrong, SOLVE, SOLVE, SOLVE], lambda turn: None)
    trainer.train()
    assert list(trainer._logs["rewards"]["DesktopEnvironment"]) == [1.0] * 4
    answers = [message["content"] for message in trainer._logs["completion"][0] if message["role"] == "tool"]
    assert "click.x" in answers[0]
    assert "missing" in answers[1]
    assert "Tool fly not found" in answers[2]
    assert "no-such-key" in str(answers[3])
    assert "has ended" in str(answers[-1]) or "closed" in str(answers[-1])


def test_errors_of_single_calls(desktops: DrawnDesktops) -> None:
    environment = DesktopEnvironment(SessionSettings.connect(desktops.address))
    assert environment.get_reward() is None
    with pytest.raises(SessionVoid):
        environment.click(1, 2)
    environment.reset(**ROW)
    with pytest.raises(BadAction, match=r"click\.button"):
        environment.click(1, 2, button="fourth")
    environment.click(822, 167)
    environment.done()
    with pytest.raises(EpisodeEnded):
        environment.wait(1)
    assert environment.get_reward() == environment.get_reward() == 1.0


def test_rows_without_a_task_get_the_environments_own(desktops: DrawnDesktops) -> None:
    environment = DesktopEnvironment(SessionSettings.connect(desktops.address), task="fake/enable")
    assert environment.reset(prompt="Act.")[0]["type"] == "text"
    assert environment.get_reward() == 0.0


def test_a_wrong_token_stops_the_training(guarded_address: str) -> None:
    environment = DesktopEnvironment(SessionSettings.connect(guarded_address, token="wrong"))  # noqa: S106
    with pytest.raises(Unauthenticated):
        environment.reset(**ROW)


def test_an_unreachable_daemon_gives_void_rollouts() -> None:
    environment = DesktopEnvironment(SessionSettings.connect("127.0.0.1:1", reset_timeout=SECOND))
    assert environment.reset(**ROW) == [{"type": "text", "text": "The desktop is unavailable."}]
    assert environment.get_reward() is None


def test_an_interrupted_process_leaves_no_machine(desktops: DrawnDesktops) -> None:
    script = (
        "from trainer.adapters.trl import DesktopEnvironment\n"
        "environments = [DesktopEnvironment() for _ in range(2)]\n"
        "for each in environments: each.reset(task_id='fake/enable')\n"
        "environments[0].click(3, 3)\n"
        "print('open', flush=True)\n"
        "environments[1].wait(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={"ENVD_TARGET": desktops.address}, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        process.send_signal(2)
        assert process.wait(60) != 0
    # Not by their leases, which last for minutes.
    assert desktops.leased_count == 0


@pytest.mark.usefixtures("on_this_cpu")
def test_the_example_takes_a_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SAMPLES", "2")
    monkeypatch.setenv("STEPS", "1")
    runpy.run_path(str(Path(__file__).parents[3] / "docs/examples/grpo_trl.py"))
    assert "train_loss" in capsys.readouterr().out
