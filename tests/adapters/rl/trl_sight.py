"""Check that a `GRPOTrainer` of TRL sees the pixels of every turn; see `trainer.sight.check`.

```python
trainer = GRPOTrainer(..., environment_factory=PictureEnvironment, train_dataset=...)   # otherwise that of the job
print(examine(trainer))
```

The pictures pass through TRL's chat template, tool loop, engine, batch and loss. After each reply but the last, a call
of a tool is added, so that models that call none reach their next turn; those tokens are not compared.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any
from unittest.mock import patch

from trainer.adapters.trl import Blocks, DesktopEnvironment
from trainer.sight.check import Episode, Patches, Report, SightPlan, compare, turns_of_row

_CALL = '<tool_call>\n{"name": "wait", "arguments": {"seconds": 1}}\n</tool_call>'
_INSTRUCTION = "The screen shows a code word. Answer with the code word that it shows now."
_PLAN = SightPlan.draw(turns=3, size_px=(320, 192))


class PictureEnvironment(DesktopEnvironment):
    """An environment with the tools of `DesktopEnvironment` that shows pictures of the plan. It needs no daemon."""

    def __init__(self) -> None:
        """Create it without pictures; `reset` chooses them."""
        self._pictures: list[Any] = []

    def reset(self, **row: Any) -> Blocks:
        """Start the episode of a row with the column `sight`."""
        self._pictures = list(_PLAN.episodes[row["sight"]])
        return [{"type": "text", "text": _INSTRUCTION}, *self._next()]

    def get_reward(self) -> float:
        """Return a reward: nothing is learnt from it."""
        return 0.0

    def _act(self, **action: Any) -> Blocks:
        return self._next()

    def _next(self) -> Blocks:
        shown = self._pictures.pop(0) if self._pictures else _PLAN.episodes[0][-1]
        return [{"type": "image", "image": shown}]


def examine(trainer: Any) -> Report:
    """Return what a trainer's engine and learner see. Weights and optimiser stay as they are.

    Args:
        trainer: A `GRPOTrainer` with `PictureEnvironment` as its environment, that generates greedily.

    Raises:
        ValueError: A reply is missing, because a budget of tokens is too small.
    """
    count = len(_PLAN.episodes)
    played = [_play(trainer, number) for number in range(count)]
    patches = Patches.of(trainer.processing_class.image_processor)
    batches = {tuple(episode[0].tokens): batch for episode, batch in played}

    def learner(tokens: Sequence[int], inputs: Mapping[str, Any]) -> Sequence[float]:
        return _learner_log_probs(trainer, {**batches[tuple(tokens)], **inputs})

    return compare(_PLAN, [episode for episode, _ in played], learner, patches)


def _play(trainer: Any, number: int) -> tuple[Episode, dict[str, Any]]:
    """Return an episode, and TRL's batch of it."""
    generations = trainer.num_generations
    rows = [{"prompt": [{"role": "user", "content": ""}], "sight": number} for _ in range(generations)]
    recorder = _Recorder(trainer)
    with patch.object(trainer, "_generate_single_turn", recorder.generate):
        batch = trainer._generate_and_score_completions(rows)
    one = _first_row(batch, generations)
    mask = one["prompt_mask"][0].bool(), one["completion_mask"][0].bool()
    prompt, completion = one["prompt_ids"][0][mask[0]].tolist(), one["completion_ids"][0][mask[1]].tolist()
    tokens = [*prompt, *completion]
    log_probs: list[float | None] = []
    for is_reply, run in groupby(one["tool_mask"][0][mask[1]].tolist()):
        count = len(list(run))
        sampled = recorder.log_probs.pop(0) if is_reply else []
        log_probs += [*sampled, *[None] * (count - len(sampled))]
    processor = trainer.processing_class
    turns = turns_of_row(
        tokens,
        one["tool_mask"][0][mask[1]].tolist(),
        log_probs,
        {name: one[name] for name in ("pixel_values", "image_grid_thw") if name in one},
        image_id=processor.tokenizer.convert_tokens_to_ids(processor.image_token),
        decode=processor.tokenizer.decode,
    )
    return turns, one


class _Recorder:
    """TRL's generation of one turn: keeps the log-probabilities of the first sequence, and adds a call of a tool."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._generate = trainer._generate_single_turn
        self.log_probs: list[list[float]] = []

    def generate(self, *given: Any, **named: Any) -> Any:
        model, scores = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped), []
        sample = model.generate

        def scored(**options: Any) -> Any:
            made = sample(**options, return_dict_in_generate=True, output_logits=True)
            scores.extend(made.logits)
            return made.sequences

        with patch.object(model, "generate", scored):
            completions, log_probs = self._generate(*given, **named)
        if log_probs is None:
            tables = [logits[0].float().log_softmax(-1) for logits in scores]
            mine = [float(table[token]) for table, token in zip(tables, completions[0], strict=False)]
        else:
            mine = list(log_probs[0])
        tokenizer = self._trainer.processing_class.tokenizer
        is_complete = completions[0][-1] == tokenizer.eos_token_id
        self.log_probs.append(mine[: len(mine) - is_complete])
        if len(self.log_probs) == len(_PLAN.words[0]):
            return completions, log_probs
        call = tokenizer.encode(f"{_CALL}{tokenizer.eos_token}", add_special_tokens=False)
        ends = [ids[-1] == tokenizer.eos_token_id for ids in completions]
        completions = [[*ids[: len(ids) - end], *call] for ids, end in zip(completions, ends, strict=True)]
        if log_probs is not None:
            log_probs = [
                [*each[: len(each) - end], *[0.0] * len(call)] for each, end in zip(log_probs, ends, strict=True)
            ]
        return completions, log_probs


def _first_row(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the first of a batch's rows as a batch; the rows have one prompt, greedy replies and equal pictures."""
    images = batch.get("num_images", [0])[0]
    patch_count = 0
    if "image_grid_thw" in batch:
        patch_count = int(batch["image_grid_thw"][:images].prod(dim=-1).sum())
    taken = {"image_grid_thw": images, "pixel_values": patch_count}
    found: dict[str, Any] = {}
    for name, value in batch.items():
        if name in taken:
            found[name] = value[: taken[name]]
        elif name == "num_images" or (hasattr(value, "shape") and value.dim() and value.shape[0] == count):
            found[name] = value[:1]
        else:
            found[name] = copy.copy(value)
    return found


def _learner_log_probs(trainer: Any, batch: dict[str, Any]) -> list[float]:
    """Return the log-probabilities of a row's tokens with which TRL computes its loss; 0 for those of the prompt."""
    import torch

    seen: list[Any] = []
    forward = trainer._get_per_token_logps_and_entropies

    def watched(*given: Any, **named: Any) -> Any:
        result = forward(*given, **named)
        seen.append(result[0])
        return result

    with torch.no_grad(), patch.object(trainer, "_get_per_token_logps_and_entropies", watched):
        trainer._compute_loss(trainer.model, batch)
    completion: list[float] = seen[0][0][batch["completion_mask"][0].bool()].tolist()
    return [0.0] * int(batch["prompt_mask"].sum()) + completion
