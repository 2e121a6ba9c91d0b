"""Draw the episodes of a demo side by side: what each showed last, whose branch it is, and what it earned."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_TILE_WIDTH_PX, _CAPTION_PX, _GAP_PX = 560, 58, 14
_COLUMN_COUNT = 2
_PAPER, _INK, _GREY, _GOOD, _BAD, _WRONG = "#f6f6f4", "#1c1c1c", "#6a6a6a", "#1a7f37", "#9a6700", "#cf222e"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One episode in the picture."""

    title: str
    detail: str
    reward: float
    as_expected: bool
    frame: str
    """Name of a PNG file."""


def draw_group(episodes: Sequence[Shown], directory: Path) -> Image.Image:
    """Return the picture. The frames lie in `directory` and are of one size."""
    with Image.open(directory / episodes[0].frame) as first:
        tile = (_TILE_WIDTH_PX, round(first.height * _TILE_WIDTH_PX / first.width))
    row_count = -(-len(episodes) // _COLUMN_COUNT)
    step = (tile[0] + _GAP_PX, tile[1] + _CAPTION_PX + _GAP_PX)
    picture = Image.new("RGB", (_GAP_PX + step[0] * _COLUMN_COUNT, _GAP_PX + step[1] * row_count), _PAPER)
    draw = ImageDraw.Draw(picture)
    large, small = ImageFont.load_default(size=24), ImageFont.load_default(size=16)
    for index, episode in enumerate(episodes):
        left, top = _GAP_PX + step[0] * (index % _COLUMN_COUNT), _GAP_PX + step[1] * (index // _COLUMN_COUNT)
        draw.text((left, top), episode.title, fill=_INK, font=large)
        draw.text((left, top + 31), episode.detail, fill=_GREY, font=small)
        colour = _WRONG if not episode.as_expected else _GOOD if episode.reward else _BAD
        draw.text((left + tile[0], top + 6), f"reward {episode.reward:g}", fill=colour, font=large, anchor="ra")
        with Image.open(directory / episode.frame) as frame:
            picture.paste(frame.convert("RGB").resize(tile, Image.Resampling.LANCZOS), (left, top + _CAPTION_PX))
        draw.rectangle((left, top + _CAPTION_PX, left + tile[0] - 1, top + _CAPTION_PX + tile[1] - 1), outline=_GREY)
    return picture
