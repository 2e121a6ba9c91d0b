"""Attacks on machines that cannot be forked while they run: each mutant is set up on its own."""

import dataclasses
from pathlib import Path

import pytest

from cuaenv.actions import Action
from cuaenv.client import AsyncEnvClient, AsyncEpisode, EnvError, GuestEnded, MachineLost, StepResult
from envd.authoring.attack.mutants import Mutant
from envd.authoring.attack.playing import Attack, attack, attack_config
from envd.authoring.desktops import own_desktops
from envd.base.config import Config
from envd.daemon.suites import load_tasks, with_suites
from envd.drawn.hypervisor import FakeHypervisor
from tests.support.daemon import fake_config

TASK = "drawn/write-press"
#: Two score 1, the others 0; each way to play a mutant is among them.
NAMES = {"step 1: left out", "step 1: after the next one", "oracle, run 1", "step 2: twice"}


async def played(tmp_path: Path) -> dict[str, Attack]:
    settings: Config = with_suites(fake_config(tmp_path), [TASK])
    task = load_tasks(settings).get(TASK)
    found: dict[str, Attack] = {}

    def is_wanted(mutant: Mutant, _: str) -> bool:
        return mutant.name in NAMES

    def on_result(result: Attack) -> None:
        found[result.mutant] = result

    await attack(
        own_desktops(attack_config(settings, parallel_count=2)),
        [task],
        parallel_count=2,
        extra={},
        is_wanted=is_wanted,
        on_result=on_result,
    )
    assert found.keys() == NAMES
    return found


async def test_mutants_have_the_scores_that_they_have_on_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked = await played(tmp_path / "forked")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("forks a machine that cannot be forked")

    apart = dataclasses.replace(FakeHypervisor.capabilities, not_forkable="these cannot be copied")
    monkeypatch.setattr(FakeHypervisor, "capabilities", apart)
    monkeypatch.setattr(AsyncEnvClient, "fork", refuse)
    alone = await played(tmp_path / "alone")
    assert {name: each.score for name, each in alone.items()} == {name: each.score for name, each in forked.items()}
    assert {each.score for each in alone.values()} == {0.0, 1.0}


async def test_a_mutant_whose_machine_cannot_be_set_up_has_no_score_and_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = dataclasses.replace(FakeHypervisor.capabilities, not_forkable="these cannot be copied")
    monkeypatch.setattr(FakeHypervisor, "capabilities", apart)
    monkeypatch.setattr(AsyncEnvClient, "reset", _unreachable)
    found = await played(tmp_path)
    assert {(each.score, each.reason, each.is_unscored) for each in found.values()} == {(None, "NOT_PLAYED", True)}


async def test_a_mutant_that_ends_its_guest_has_no_score_and_is_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(*_: object) -> None:
        raise GuestEnded("powered off", reason="GUEST_ENDED")

    monkeypatch.setattr(AsyncEpisode, "step", end)
    # Those that take no step of their own are played as they are.
    found = [each for each in (await played(tmp_path)).values() if each.reason != "NOT_PLAYED"]
    ended = {(each.score, each.reason, each.is_unscored) for each in found if each.score is None}
    assert ended == {(None, "GUEST_ENDED", False)}


@pytest.mark.parametrize("can_fork", [True, False])
@pytest.mark.parametrize("always", [True, False])
async def test_what_a_lost_machine_played_is_played_on_another_at_most_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_fork: bool, always: bool
) -> None:
    if not can_fork:
        apart = dataclasses.replace(FakeHypervisor.capabilities, not_forkable="these cannot be copied")
        monkeypatch.setattr(FakeHypervisor, "capabilities", apart)
    steps: list[str] = []
    original = AsyncEpisode.step

    async def lose(episode: AsyncEpisode, *actions: Action) -> StepResult:
        steps.append(episode.episode_id)
        if always or len(steps) <= 2:
            raise MachineLost("gone", reason="MACHINE_LOST")
        return await original(episode, *actions)

    monkeypatch.setattr(AsyncEpisode, "step", lose)
    found = (await played(tmp_path)).values()
    if always:
        assert all(each.is_unscored for each in found)
        assert {each.reason for each in found} <= {"MACHINE_LOST", "NOT_PLAYED"}
        # Also of the machine that is forked.
        assert len(steps) <= 3 * (len(found) + 1)
    else:
        assert {each.score for each in found} == {0.0, 1.0}


def _unreachable(*_: object, **__: object) -> object:
    raise EnvError("the host is gone")
