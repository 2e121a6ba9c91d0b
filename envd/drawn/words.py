"""Words of labelled screens: some are never trained, so that probes can ask about them."""

import functools
import re
import string
import zlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from random import Random

from envd.drawn.suite.desk import COLOURS, WORDS

#: One of so many words is one that only unseen screens have. The suite's own words are seen.
_UNSEEN = 8


def vocabulary(is_unseen: bool, seed: int) -> Callable[[Random], list[str]]:
    """Return what chooses different words for one screen: of the suites, known ones, and invented ones."""
    rng = Random(f"{seed} words")  # noqa: S311 - not a secret
    invented = (invented_word(rng) for _ in range(40_000 if is_unseen else 20_000))
    parts = (
        (() if is_unseen else WORDS, 10),
        ([word for word in _known_words() if is_unseen_word(word) == is_unseen], 30),
        ([word for word in invented if is_unseen_word(word) == is_unseen], 40),
    )

    def sample(rng: Random) -> list[str]:
        return list(dict.fromkeys(word for words, count in parts for word in rng.sample(words, min(count, len(words)))))

    return sample


def digest(text: str) -> int:
    """Return a number that is the same on all hosts."""
    return zlib.crc32(text.encode())


def is_unseen_word(word: str) -> bool:
    return word not in WORDS and digest(word.lower()) % _UNSEEN == 0


def invented_word(rng: Random) -> str:
    """Return two to six letters, perhaps with digits."""
    length = rng.randint(2, 6)
    match rng.randint(0, 3):
        case 0:
            letters = rng.choices(string.ascii_lowercase, k=length)
        case 1:
            letters = rng.choices(string.ascii_lowercase + string.ascii_uppercase + string.digits, k=length)
        case _:
            letters = [rng.choice("aeiou" if index % 2 else "bcdfghjklmnprstvwz") for index in range(length)]
    word = "".join(letters)
    return word.capitalize() if rng.random() < 0.3 else word


@functools.cache
def _known_words() -> list[str]:
    """Return the words of the instructions of all suites, without those that name a button by its colour."""
    folder = Path(str(files("envd.tasks") / "suites"))
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.yaml"))]
    words = {word for text in texts for word in re.findall(r"(?<![\w/.-])[A-Za-z]{3,6}(?![\w/.-])", text)}
    return sorted(words - COLOURS.keys())
