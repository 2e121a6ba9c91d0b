"""Draw two recorded episodes of one task side by side, with pointers and replies, as a GIF."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

from trainer.learn.replay import Played

_TURN_MS, _END_MS = 1500, 3000
_MARGIN, _LINE = 12, 20
_HEAD_LINES, _REPLY_LINES = 2, 4
_PAPER, _INK, _FAINT, _POINTER = "#f6f8fa", "#1f2328", "#656d76", "#d1242f"
_FONT_PX = 15
_CHARACTER_PX = 8


def draw(path: Path, sides: Sequence[tuple[str, Played]]) -> None:
    """Write a GIF; each side has a title and an episode, and waits at its end for the longer one."""
    count = max(len(played.turns) for _, played in sides)
    pictures = [_picture(sides, index) for index in range(count + 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    durations = [_TURN_MS] * count + [_END_MS]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True)


def _picture(sides: Sequence[tuple[str, Played]], index: int) -> Image.Image:
    width, height = sides[0][1].frames[0].size
    top = _MARGIN + _HEAD_LINES * _LINE + _LINE
    picture = Image.new(
        "RGB", (_MARGIN + len(sides) * (width + _MARGIN), top + height + (_REPLY_LINES + 1) * _LINE), _PAPER
    )
    page, font = ImageDraw.Draw(picture), ImageFont.load_default(_FONT_PX)
    for row, line in enumerate(wrap(sides[0][1].instruction, picture.width // _CHARACTER_PX)[:_HEAD_LINES]):
        page.text((_MARGIN, _MARGIN + row * _LINE), line, fill=_INK, font=font)
    for column, (title, played) in enumerate(sides):
        left = _MARGIN + column * (width + _MARGIN)
        has_ended = index >= len(played.turns)
        verdict = f": {'solved' if (played.score or 0) >= 1 else 'failed'}" if has_ended else ""
        page.text((left, top - _LINE), f"{title}{verdict}", fill=_INK, font=font)
        if has_ended:
            picture.paste(played.frames[-1], (left, top))
            continue
        turn = played.turns[index]
        picture.paste(played.frames[turn.frame], (left, top))
        if turn.point is not None:
            _draw_pointer(page, left + turn.point[0] * width, top + turn.point[1] * height)
        text = wrap(" ".join(turn.text.split()), width // _CHARACTER_PX)[:_REPLY_LINES]
        for row, line in enumerate(text):
            page.text((left, top + height + _LINE // 2 + row * _LINE), line, fill=_FAINT, font=font)
    return picture


def _draw_pointer(page: ImageDraw.ImageDraw, x: float, y: float) -> None:
    page.ellipse((x - 11, y - 11, x + 11, y + 11), outline=_POINTER, width=2)
    arrow = [(0, 0), (0, 16), (4, 12), (7, 18), (10, 17), (7, 11), (12, 11)]
    page.polygon([(x + dx, y + dy) for dx, dy in arrow], fill="#ffffff", outline="#000000")
