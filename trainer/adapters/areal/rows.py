"""Convert turns into AReaL's training rows: one row per turn, padded on the right."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.adapters.areal.engine import TurnRow
from trainer.tokens.chat import Chat

#: torch types of the columns, as in AReaL's own workflows.
_TYPES: Mapping[str, str] = {
    "input_ids": "long",
    "loss_mask": "int32",
    "logprobs": "float32",
    "versions": "int32",
    "attention_mask": "bool",
    "mm_token_type_ids": "long",
}


def discounted(reward: float, *, turn_count: int, discount: float) -> list[float]:
    """Return each turn's return: the episode's reward at the last turn, discounted backwards. Pure."""
    return [reward * discount ** (turn_count - 1 - turn) for turn in range(turn_count)]


def columns(rows: Sequence[TurnRow], *, image_id: int | None) -> dict[str, list[list[float]]]:
    """Return the columns of shape (rows, longest row's tokens). Pure.

    Prompts have mask 0, log-probability 0 and version -1; padding is 0 everywhere. `mm_token_type_ids`, 1 for image
    placeholders, exists if any row has images.
    """
    width = max(len(row.input_ids) + len(row.output_ids) for row in rows)

    def padded(prompt: Sequence[float], reply: Sequence[float]) -> list[float]:
        return [*prompt, *reply, *[0] * (width - len(prompt) - len(reply))]

    made: dict[str, list[list[float]]] = {name: [] for name in _TYPES}
    for turn in rows:
        prompt, reply = len(turn.input_ids), len(turn.output_ids)
        made["input_ids"].append(padded(turn.input_ids, turn.output_ids))
        made["loss_mask"].append(padded([0] * prompt, [1] * reply))
        made["logprobs"].append(padded([0.0] * prompt, turn.log_probs))
        made["versions"].append(padded([-1] * prompt, turn.versions))
        made["attention_mask"].append(padded([1] * prompt, [1] * reply))
        made["mm_token_type_ids"].append(padded([int(token == image_id) for token in turn.input_ids], [0] * reply))
    if not any(row.images for row in rows):
        del made["mm_token_type_ids"]
    return made


def batch(rows: Sequence[TurnRow], chat: Chat) -> dict[str, Any]:
    """Return rows as AReaL's tensors: `columns`, `rewards` of shape (rows,), and images.

    With images, `multi_modal_input` has `pixel_values` and `image_grid_thw` of each row. Images repeat from turn to
    turn; `agent.images_per_row` bounds their number.

    Raises:
        ModelFailed: A row's images do not match its ids.
    """
    import torch  # noqa: PLC0415 -- with AReaL there is torch; without it nothing here needs it

    made: dict[str, Any] = {
        name: torch.tensor(column, dtype=getattr(torch, _TYPES[name]))
        for name, column in columns(rows, image_id=chat.image_id).items()
    }
    made["rewards"] = torch.tensor([row.value for row in rows], dtype=torch.float32)
    if "mm_token_type_ids" in made:
        made["multi_modal_input"] = [chat.tensors(row.images, row.input_ids) or {} for row in rows]
    return made
