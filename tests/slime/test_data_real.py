"""What `trainer data` writes, read by slime's own reader, and masked by its own masks."""

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from cuaenv.client import Click, Done, Task
from trainer.agent.grammars import grammar
from trainer.data.files import write_rows
from trainer.data.prompts import prompt_rows
from trainer.data.sft import sft_row
from trainer.replay.trajectory import StoredTrajectory
from trainer.slime.hooks import generate_rollout

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300)]

SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
CLICK, DONE = (grammar("qwen3-vl").render([action]) for action in (Click(640, 125), Done()))


def slime_reads(path: Path, checkpoint: Path, **options: Any) -> list[Any]:
    from slime.utils.data import Dataset
    from slime.utils.processing_utils import load_processor, load_tokenizer

    tokenizer = load_tokenizer(str(checkpoint), trust_remote_code=True)
    processor = load_processor(str(checkpoint), trust_remote_code=True)
    assert processor is not None
    return list(Dataset(str(path), tokenizer, processor, None, metadata_key="metadata", **options).samples)


@SUFFIXES
def test_prompts_become_samples_with_their_tasks(suffix: str, checkpoint: Path, tmp_path: Path) -> None:
    tasks = [Task(task_id=f"s/t{level}", instruction=f"Do {level}.", level=level, suite="s") for level in (1, 2)]
    path = tmp_path / f"train{suffix}"
    write_rows(path, prompt_rows(tasks, share=0)["train"])
    samples = slime_reads(path, checkpoint, prompt_key="prompt", label_key="label", apply_chat_template=True)
    assert [sample.label for sample in samples] == ["s/t1", "s/t2"]
    assert [sample.metadata["task_id"] for sample in samples] == ["s/t1", "s/t2"]
    assert all("Do" in sample.prompt for sample in samples)


@SUFFIXES
def test_rows_for_the_supervised_loss_have_their_images_and_only_trained_turns_in_the_mask(
    suffix: str, checkpoint: Path, tmp_path: Path
) -> None:
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator
    from slime.utils.processing_utils import load_tokenizer

    buffer = io.BytesIO()
    Image.new("RGB", (64, 32), "red").save(buffer, "PNG")
    shown = {"role": "user", "content": "<image>Look."}
    said = [{"role": "assistant", "content": text} for text in (CLICK, CLICK, DONE)]
    said[1]["step_loss_mask"] = 0  # type: ignore[assignment]
    trajectory = StoredTrajectory(
        task_id="a",
        messages=(shown, said[0], shown, said[1], shown, said[2]),
        images=(base64.b64encode(buffer.getvalue()).decode(),) * 3,
    )
    path = tmp_path / f"sft{suffix}"
    write_rows(path, [row for row in [sft_row(trajectory)] if row is not None])
    (sample,) = slime_reads(path, checkpoint, prompt_key="messages", multimodal_keys={"image": "images"})
    assert [image.size for image in sample.multimodal_inputs["images"]] == [(64, 32)] * 3
    tokenizer = load_tokenizer(str(checkpoint), trust_remote_code=True)
    generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen3_5")
    ids, mask = generator.get_loss_mask(sample.prompt)
    trained = tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if one])
    assert trained.replace("<|im_end|>\n", "") == CLICK + DONE

    args = SimpleNamespace(hf_checkpoint=str(checkpoint), loss_mask_type="qwen3_5", rollout_batch_size=1)
    example: Any
    [[example]] = generate_rollout(args, 0, SimpleNamespace(get_samples=lambda count: [[sample]]))
    assert len(example.tokens) == len(ids) + 3 * (2 - 1), "64x32 pixels are two tokens"
    words = [
        token for token, one in zip(example.tokens[-example.response_length :], example.loss_mask, strict=True) if one
    ]
    assert tokenizer.decode(words) == trained
    assert example.loss_mask[0] == 1
    grids = example.multimodal_train_inputs["image_grid_thw"]
    assert int(grids.prod(dim=1).sum()) // 4 == 3 * 2
    assert len(example.multimodal_train_inputs["pixel_values"]) == 3 * 2 * 4
