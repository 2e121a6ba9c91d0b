"""`trainer sight` on slime's rollout code and a small model; faults of published systems are planted and found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops

from tests.support.slime_job import SlimeJob
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message
from trainer.learn.sight import ModelServer, job_args, rolled_out, tiny_model
from trainer.sight.check import Episode, Learner, Patches, Report, compare, given_pictures
from trainer.sight.episode import plan_of
from trainer.sight.model import SightModel
from trainer.slime.config import Halted
from trainer.slime.play.samples import facts_of, flatten
from trainer.tokens.chat import Chat

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

AGENT = {"image_max_pixels": 36_864, "max_turns": 3, "prompt_tokens": 4096, "reply_tokens": 12}
SETTINGS = AgentSettings.from_mapping(AGENT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SightModel:
    return SightModel(tiny_model(tmp_path_factory.mktemp("model") / "tiny", SETTINGS))


@dataclass
class World:
    """A job whose parts can be replaced."""

    model: SightModel
    directory: Path
    server: type[ModelServer] = ModelServer

    @contextmanager
    def job(self, **envd: Any) -> Iterator[SlimeJob]:
        checkpoint = self.model.model.config._name_or_path
        with self.server(self.model) as engine:
            agent = AgentSettings.from_mapping({**AGENT, **envd.pop("agent", {})})
            args = job_args(envd, agent, checkpoint, self.directory, engine=(engine.host, engine.ports[0]))
            with SlimeJob(args) as job:
                yield job

    def episodes(self) -> list[Episode]:
        with self.job() as job:
            return rolled_out(job, self.model)

    def report(self, *, learner: Learner | None = None, batch: Callable[[Episode], Episode] | None = None) -> Report:
        episodes = self.episodes()
        if batch is not None:
            episodes = [batch(episode) for episode in episodes]
        return compare(plan_of(SETTINGS), episodes, learner or self.model.log_probs, self.patches)

    @property
    def patches(self) -> Patches:
        return Patches.of(self.model.processor.image_processor)


@pytest.fixture
def world(model: SightModel, tmp_path: Path) -> World:
    return World(model, tmp_path)


def found(report: Report) -> dict[str, set[int]]:
    """Return the turns with findings, by side."""
    sides: dict[str, set[int]] = {}
    for each in report.findings:
        sides.setdefault(each.side, set()).add(each.turn)
    return sides


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values of all turns, none of which is missing."""
    assert None not in values
    return [value for value in values if value is not None]


def test_a_job_that_sees_its_pixels_has_no_finding(world: World) -> None:
    episodes = world.episodes()
    report = compare(plan_of(SETTINGS), episodes, world.model.log_probs, world.patches)
    assert report.findings == []
    assert report.noise < 1e-3
    assert min(known(report.engine_change)) > 0.05
    gaps = zip(known(report.gap), known(report.learner_change), strict=True)
    assert all(gap < change / 20 for gap, change in gaps)
    sheet = given_pictures(plan_of(SETTINGS), episodes, world.patches)
    # The lower half shows the same pictures as the upper one.
    width, height = plan_of(SETTINGS).episodes[0][0].size
    for turn in range(3):
        x = 8 + turn * (width + 8)
        drawn, given = (sheet.crop((x, y, x + width, y + height)) for y in (18, 18 + height + 18))
        assert np.asarray(ImageChops.difference(drawn, given)).max() <= 2


def test_a_learner_that_never_gets_pixel_values_is_found(world: World) -> None:
    """A fault of agent-lightning 1.0."""
    report = world.report(learner=lambda tokens, inputs: world.model.log_probs(tokens, {}))
    assert found(report)["learner"] == {1, 2, 3}
    assert "engine" not in found(report)
    assert "pixel_values" in str(report)


class BlindServer(ModelServer):
    """Reads prompts without their pictures, as NeMo-RL's asynchronous rollouts did."""

    def reply(self, ids: Sequence[int], images: Sequence[Any], *, limit: int) -> tuple[list[int], list[float]]:
        inputs = self._model.processor.image_processor(images=list(images), return_tensors="pt")
        return self._model.reply(self._model.expanded(ids, inputs), [], limit=limit)


def test_an_engine_whose_requests_lose_their_pictures_is_found(world: World) -> None:
    world.server = BlindServer
    report = world.report()
    assert found(report)["engine"] == {1, 2, 3}
    assert "learner" not in found(report)


def test_tensors_that_are_lost_on_the_way_to_the_learner_are_found(world: World) -> None:
    """A fault between verifiers and prime-rl: the wire format left the tensors out."""
    report = world.report(batch=lambda episode: [replace(turn, inputs={}) for turn in episode])
    assert found(report)["learner"] == {1, 2, 3}
    assert "engine" not in found(report)
    assert "its row has 0 pictures" in str(report)


def without_pictures(message: Message) -> Message:
    return Message(message.role, tuple(part for part in message.parts if isinstance(part, str)))


def test_pictures_that_are_lost_after_the_first_turn_are_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of slime's multi-turn example: both sides see the first picture alone."""
    following = Chat.following
    monkeypatch.setattr(
        Chat, "following", lambda self, message, **more: following(self, without_pictures(message), **more)
    )
    report = world.report()
    assert found(report)["engine"] == {2, 3}
    assert found(report)["learner"] == {2, 3}
    assert "its row has the picture of turn 1" in str(report)


def test_pictures_that_no_side_gets_are_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of verl's multi-turn rollout."""
    opening, following = Chat.opening, Chat.following
    monkeypatch.setattr(Chat, "opening", lambda self, messages: opening(self, list(map(without_pictures, messages))))
    monkeypatch.setattr(
        Chat, "following", lambda self, message, **more: following(self, without_pictures(message), **more)
    )
    report = world.report()
    assert found(report)["engine"] == {1, 2, 3}
    assert found(report)["learner"] == {1, 2, 3}


class CachingServer(ModelServer):
    """Has a prefix cache whose keys are token ids without the pictures."""

    def __init__(self, model: SightModel) -> None:
        super().__init__(model)
        self._cached: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def reply(self, ids: Sequence[int], images: Sequence[Any], *, limit: int) -> tuple[list[int], list[float]]:
        if tuple(ids) not in self._cached:
            self._cached[tuple(ids)] = super().reply(ids, images, limit=limit)
        return self._cached[tuple(ids)]


def test_an_engine_that_caches_prefixes_by_their_tokens_is_found(world: World) -> None:
    world.server = CachingServer
    assert found(world.report())["engine"] == {1, 2, 3}


class BlueServer(ModelServer):
    """Takes blue for red."""

    def reply(self, ids: Sequence[int], images: Sequence[Any], *, limit: int) -> tuple[list[int], list[float]]:
        return super().reply(ids, [Image.merge("RGB", each.split()[::-1]) for each in images], limit=limit)


def test_an_engine_with_other_colour_channels_is_found(world: World) -> None:
    world.server = BlueServer
    assert found(world.report()).keys() == {"engine and learner"}


def reversed_pictures(episode: Episode) -> Episode:
    def reverse(inputs: Mapping[str, Any]) -> dict[str, Any]:
        grids = inputs["image_grid_thw"]
        parts = inputs["pixel_values"].split(grids.prod(dim=1).tolist())
        import torch

        return {"pixel_values": torch.cat(parts[::-1]), "image_grid_thw": grids.flip(0)}

    return [replace(turn, inputs=reverse(turn.inputs)) for turn in episode]


def test_pictures_in_another_order_are_found(world: World) -> None:
    report = world.report(batch=reversed_pictures)
    assert found(report)["learner"] == {1, 3}
    assert "its row has the picture of turn 3" in str(report)


def test_rows_of_one_picture_each_are_examined_too(world: World) -> None:
    agent = {**AGENT, "images_per_row": 1, "images_kept": 1}
    with world.job(agent=agent) as job:
        episodes = rolled_out(job, world.model)
    assert [turn.image for turn in episodes[0]] == [0, 0, 0]
    assert len({tuple(turn.tokens) for turn in episodes[0]}) == 3
    plan = plan_of(AgentSettings.from_mapping(agent))
    assert compare(plan, episodes, world.model.log_probs, world.patches).findings == []


def width_px(path: Path) -> int:
    with Image.open(path) as picture:
        return picture.width


@pytest.mark.parametrize("setting", ["warn", "refuse"])
def test_a_job_is_warned_or_refused_before_its_first_episode(
    world: World, setting: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    world.server = BlindServer
    job_settings = {"sight": setting, "record_dir": str(tmp_path / "records"), "attempts": 1}
    with world.job(**job_settings, run=setting) as job:
        job.args.custom_generate_function_path = "trainer.slime.hooks.generate"
        job.args.rollout_batch_size = job.args.over_sampling_batch_size = job.args.global_batch_size = 1
        # No daemon answers: the check needs none, and an episode that starts is void.
        job.args.envd = {**job.args.envd, "agent": {**job.args.envd["agent"], "reset_timeout_s": 2.0}}
        if setting == "refuse":
            with pytest.raises(Halted, match="does not see its pixels: turn 1, engine"):
                job.rollout()
        else:
            (sample,) = flatten(job.rollout().samples)
            assert facts_of(sample)["void"] == "Unreachable"
    assert "turn 1, engine: another picture changes its log-probabilities by 0 nats" in caplog.text
    assert width_px(tmp_path / "records" / "sight.png") > 600


def test_the_command_reports_and_draws(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer", "sight", "--json", "--picture", str(tmp_path / "sight.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["findings"] == []
    assert width_px(tmp_path / "sight.png") > 900
