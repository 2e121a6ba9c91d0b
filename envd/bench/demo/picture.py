"""Draws the episodes of a demo side by side: last frame, parent and reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_TILE_WIDTH_PX, _CAPTION_PX, _GAP_PX = 560, 58, 14
_LINE_PX = 22
_COLUMN_COUNT = 2
_PAPER, _INK, _GREY, _GOOD, _BAD, _WRONG = "#f6f6f4", "#1c1c1c", "#6a6a6a", "#1a7f37", "#9a6700", "#cf222e"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One episode in the picture."""

    title: str
    detail: str
    reward: float
    expected_reward: float
    frame: str
    """Name of a PNG file."""

    @property
    def verdict(self) -> str:
        """The reward, and the expected one if it differs."""
        reward = f"reward {self.reward:g}"
        return reward if self.reward == self.expected_reward else f"{reward}, not {self.expected_reward:g}"


def draw_group(episodes: Sequence[Panel], directory: Path, *, heading: str, text: str) -> Image.Image:
    """Return the picture. All frames have the same size.

    Args:
        episodes: At least one, row by row.
        directory: Of the frames.
        heading: One line above the frames.
        text: Text below the heading; it is wrapped.
    """
    with Image.open(directory / episodes[0].frame) as first:
        tile = (_TILE_WIDTH_PX, round(first.height * _TILE_WIDTH_PX / first.width))
    large, small = ImageFont.load_default(size=24), ImageFont.load_default(size=16)
    step = (tile[0] + _GAP_PX, tile[1] + _CAPTION_PX + _GAP_PX)
    width_px = _GAP_PX + step[0] * _COLUMN_COUNT
    lines = _wrapped(text, small, width_px=width_px - 2 * _GAP_PX)
    top_px = 2 * _GAP_PX + 31 + _LINE_PX * len(lines)
    row_count = -(-len(episodes) // _COLUMN_COUNT)
    picture = Image.new("RGB", (width_px, top_px + _GAP_PX + step[1] * row_count), _PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((_GAP_PX, _GAP_PX), heading, fill=_INK, font=large)
    for index, line in enumerate(lines):
        draw.text((_GAP_PX, _GAP_PX + 31 + _LINE_PX * index), line, fill=_GREY, font=small)
    for index, episode in enumerate(episodes):
        left, top = _GAP_PX + step[0] * (index % _COLUMN_COUNT), top_px + step[1] * (index // _COLUMN_COUNT)
        draw.text((left, top), episode.title, fill=_INK, font=large)
        draw.text((left, top + 31), episode.detail, fill=_GREY, font=small)
        colour = _WRONG if episode.reward != episode.expected_reward else _GOOD if episode.reward else _BAD
        draw.text((left + tile[0], top), episode.verdict, fill=colour, font=large, anchor="ra")
        with Image.open(directory / episode.frame) as frame:
            picture.paste(frame.convert("RGB").resize(tile, Image.Resampling.LANCZOS), (left, top + _CAPTION_PX))
        draw.rectangle((left, top + _CAPTION_PX, left + tile[0] - 1, top + _CAPTION_PX + tile[1] - 1), outline=_GREY)
    return picture


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, *, width_px: int) -> list[str]:
    """Wrap a text between words. A word that is too long gets a line of its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width_px:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
