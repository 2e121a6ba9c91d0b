"""Draws the episodes of a demo side by side: last frame, parent and reward."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from envd.bench.demo.report import EpisodeRecord

_TILE_WIDTH_PX, _CAPTION_PX, _GAP_PX = 560, 58, 14
_LINE_PX = 22
_COLUMN_COUNT = 2
_PAPER, _INK, _GREY, _GOOD, _BAD, _WRONG = "#f6f6f4", "#1c1c1c", "#6a6a6a", "#1a7f37", "#9a6700", "#cf222e"


def draw_group(episodes: "Sequence[EpisodeRecord]", directory: Path, *, heading: str, text: str) -> Image.Image:
    """Return the picture. All frames have the same size."""
    with Image.open(directory / episodes[0].steps[-1].frame) as first:
        tile = (_TILE_WIDTH_PX, round(first.height * _TILE_WIDTH_PX / first.width))
    large, small = ImageFont.load_default(size=24), ImageFont.load_default(size=16)
    step = (tile[0] + _GAP_PX, tile[1] + _CAPTION_PX + _GAP_PX)
    width_px = _GAP_PX + step[0] * _COLUMN_COUNT
    lines = _wrapped(text, small, width_px=width_px - 2 * _GAP_PX)
    top_px = 2 * _GAP_PX + 31 + _LINE_PX * len(lines)
    row_count = -(-len(episodes) // _COLUMN_COUNT)
    picture = Image.new("RGB", (width_px, top_px + _GAP_PX + step[1] * row_count), _PAPER)
    draw = ImageDraw.Draw(picture)
    names = {episode.episode_id: episode.policy for episode in episodes}
    draw.text((_GAP_PX, _GAP_PX), heading, fill=_INK, font=large)
    for index, line in enumerate(lines):
        draw.text((_GAP_PX, _GAP_PX + 31 + _LINE_PX * index), line, fill=_GREY, font=small)
    for index, episode in enumerate(episodes):
        left, top = _GAP_PX + step[0] * (index % _COLUMN_COUNT), top_px + step[1] * (index // _COLUMN_COUNT)
        draw.text((left, top), episode.policy, fill=_INK, font=large)
        role = f"branch of {names[parent]}" if (parent := episode.parent_episode_id) else "member of the group"
        draw.text((left, top + 31), f"{role}: {episode.description}", fill=_GREY, font=small)
        colour = _WRONG if not episode.as_expected else _GOOD if episode.reward else _BAD
        draw.text((left + tile[0], top), episode.verdict, fill=colour, font=large, anchor="ra")
        with Image.open(directory / episode.steps[-1].frame) as frame:
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
