"""Replays of learnt tasks: which task is chosen, and what is drawn."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from tests.tools.learning.replay import Played, PlayedTurn, choose_task, draw
from trainer.learn import LearnError
from trainer.learn.record import HeldOutEvaluation, HeldOutScore

RED, BLUE = (200, 0, 0), (0, 0, 200)


def evaluate(directory: Path, **scores: float | None) -> None:
    found = [HeldOutScore(task_id=name, score=score) for name, score in scores.items()]
    HeldOutEvaluation(update=0, temperature=0.0, scores=found).add_to(directory)


def test_the_task_is_one_that_was_learnt(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="or give --task"):
        choose_task(tmp_path)
    evaluate(tmp_path, always=1.0, learnt=0.0, forgotten=1.0, void=0.0)
    evaluate(tmp_path, always=1.0, learnt=1.0, forgotten=0.0, void=None)
    assert choose_task(tmp_path) == "learnt"


def test_without_a_learnt_task_it_is_a_solved_one(tmp_path: Path) -> None:
    evaluate(tmp_path, failed=0.0, solved=1.0)
    evaluate(tmp_path, failed=0.0, solved=1.0)
    assert choose_task(tmp_path) == "solved"


def played(*, score: float, turns: list[PlayedTurn]) -> Played:
    frames = [Image.new("RGB", (200, 100), colour) for colour in (RED, BLUE)]
    return Played(task_id="drawn/press", instruction="Press kite.", score=score, error="", turns=turns, frames=frames)


def test_the_shorter_episode_waits_at_its_end_for_the_longer_one(tmp_path: Path) -> None:
    click = PlayedTurn(frame=0, text="click " * 60, point=(0.5, 0.5))
    done = PlayedTurn(frame=1, text="done", point=None)
    path = tmp_path / "new" / "replay.gif"
    draw(path, [("cloned", played(score=0, turns=[click])), ("after", played(score=1, turns=[click, done]))])
    with Image.open(path) as picture:
        pages = [np.asarray(page.convert("RGB")) for page in ImageSequence.Iterator(picture)]
    is_red = [[bool(page[80, x, 0] > 100) for x in (20, 240)] for page in pages]
    assert is_red == [[True, True], [False, False], [False, False]]
