"""A Qwen-VL model on this machine, as the check's engine and learner. Needs torch and transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.sight.check import has_pixels


class SightModel:
    """A checkpoint in single precision."""

    def __init__(self, checkpoint: Path | str) -> None:
        """Load it."""
        from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: PLC0415 -- seconds

        self.model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="float32").eval()
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
        self.tokenizer = self.processor.tokenizer
        self.image_id = int(self.tokenizer.convert_tokens_to_ids(self.processor.image_token))

    def log_probs(self, tokens: Sequence[int], inputs: Mapping[str, Any]) -> list[float]:
        """Return the log-probability of each token given those before it; see `trainer.sight.check.Learner`."""
        import torch  # noqa: PLC0415

        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            logits = self.model(input_ids=ids, **self._images(ids, inputs)).logits[0, :-1]
        table = torch.log_softmax(logits.float(), dim=-1)
        return [0.0, *table.gather(1, ids[0, 1:, None])[:, 0].tolist()]

    def reply(self, ids: Sequence[int], images: Sequence[Any], *, limit: int) -> tuple[list[int], list[float]]:
        """Return a greedy reply and its log-probabilities.

        Args:
            ids: The prompt, with one placeholder for each image.
            images: Pictures for Pillow.
            limit: Most tokens.
        """
        import torch  # noqa: PLC0415

        inputs = self.processor.image_processor(images=list(images), return_tensors="pt") if images else {}
        prompt = torch.tensor([self.expanded(ids, inputs)])
        end = self.tokenizer.eos_token_id
        made = self.model.generate(
            input_ids=prompt,
            **self._images(prompt, inputs),
            do_sample=False,
            max_new_tokens=limit,
            eos_token_id=end,
            # A sampled placeholder would shift all later pictures; random weights sample them.
            suppress_tokens=[each for each in self.tokenizer.all_special_ids if each != end],
            pad_token_id=end,
            return_dict_in_generate=True,
            output_logits=True,
        )
        reply = made.sequences[0, prompt.shape[1] :].tolist()
        tables = [torch.log_softmax(logits[0].float(), dim=-1) for logits in made.logits]
        return reply, [float(table[token]) for table, token in zip(tables, reply, strict=True)]

    def expanded(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> list[int]:
        """Return a prompt with one placeholder for each image token."""
        merge = self.processor.image_processor.merge_size
        counts = iter([int(grid.prod()) // merge**2 for grid in inputs.get("image_grid_thw", ())])
        return [each for one in ids for each in [one] * (next(counts, 1) if one == self.image_id else 1)]

    def _images(self, ids: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not has_pixels(inputs):
            return {}
        floats = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
        return {"mm_token_type_ids": (ids == self.image_id).int(), **floats}
