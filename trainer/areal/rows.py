"""Turns as AReaL trains on them: one row each, padded on the right to the longest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.areal.conversation import TurnRow
from trainer.tokens.chat import Chat

#: torch's names of the columns' types, as AReaL's own workflows have them.
_TYPES: Mapping[str, str] = {
    "input_ids": "long",
    "loss_mask": "int32",
    "logprobs": "float32",
    "versions": "int32",
    "attention_mask": "bool",
    "mm_token_type_ids": "long",
}


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A turn and what it is worth."""

    turn: TurnRow
    value: float


def columns(rows: Sequence[Rewarded], *, image_id: int | None) -> dict[str, list[list[float]]]:
    """Return the columns of shape (rows, longest row's tokens). Pure.

    What the model read has mask 0, log-probability 0 and version -1; padding is 0 everywhere.
    `mm_token_type_ids` is there where any row has images: 1 for their placeholders.
    """
    width = max(len(row.turn.input_ids) + len(row.turn.output_ids) for row in rows)

    def padded(asked: Sequence[float], said: Sequence[float]) -> list[float]:
        return [*asked, *said, *[0] * (width - len(asked) - len(said))]

    made: dict[str, list[list[float]]] = {name: [] for name in _TYPES}
    for turn in (row.turn for row in rows):
        asked, said = len(turn.input_ids), len(turn.output_ids)
        made["input_ids"].append(padded(turn.input_ids, turn.output_ids))
        made["loss_mask"].append(padded([0] * asked, [1] * said))
        made["logprobs"].append(padded([0.0] * asked, turn.log_probs))
        made["versions"].append(padded([-1] * asked, turn.versions))
        made["attention_mask"].append(padded([1] * asked, [1] * said))
        made["mm_token_type_ids"].append(padded([int(token == image_id) for token in turn.input_ids], [0] * said))
    if not any(row.turn.images for row in rows):
        del made["mm_token_type_ids"]
    return made


def batch(rows: Sequence[Rewarded], chat: Chat) -> dict[str, Any]:
    """Return rows as the tensors that AReaL takes: `columns`, `rewards` of shape (rows,), and images.

    With images, `multi_modal_input` has `pixel_values` and `image_grid_thw` for each row: all that it read, so they
    repeat from turn to turn. `agent.images_per_row` bounds that.

    Raises:
        ModelFailed: A row's images are not what its ids say.
    """
    import torch  # noqa: PLC0415 -- with AReaL there is torch; without it nothing here needs it

    made: dict[str, Any] = {
        name: torch.tensor(column, dtype=getattr(torch, _TYPES[name]))
        for name, column in columns(rows, image_id=chat.image_id).items()
    }
    made["rewards"] = torch.tensor([row.value for row in rows], dtype=torch.float32)
    if "mm_token_type_ids" in made:
        made["multi_modal_input"] = [chat.tensors(row.turn.images, row.turn.input_ids) or {} for row in rows]
    return made
