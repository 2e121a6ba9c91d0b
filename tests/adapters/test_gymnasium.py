"""Desktops as Gymnasium environments, with Gymnasium's own checks and vector environments."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, VectorEnv

from cuaenv.client import TaskNotFound, Unauthenticated
from envd.desktop.input.keysyms import named_key
from tests.support.desktops import DrawnDesktops
from trainer.adapters.actions import read_actions
from trainer.adapters.gymnasium import KEYS, KINDS, MODIFIERS, DesktopEnv, form_of

TASK = "fake/enable"
BOX = {"action": "click", "x": 822, "y": 167}
MISS = {"action": "click", "x": 5, "y": 5}
DONE = {"action": "done"}


def make(desktops: DrawnDesktops, **options: Any) -> Any:
    given = {"task": TASK, "envd": desktops.address, **options}
    return gymnasium.make("trainer.adapters.gymnasium:envd/Desktop-v0", **given)


@pytest.fixture
def env(desktops: DrawnDesktops) -> Iterator[Any]:
    """One environment, with Gymnasium's own wrappers."""
    env = make(desktops, render_mode="rgb_array")
    yield env
    env.close()


# Gymnasium's complaints are warnings, which are errors in tests.
def test_gymnasiums_own_check_passes(env: Any) -> None:
    check_env(env.unwrapped)


def test_a_solved_task_gives_1(env: Any) -> None:
    screen, info = env.reset(seed=1)
    assert screen.shape == (800, 1280, 3)
    assert info == {"task": TASK, "instruction": "Check the box Enabled."}
    after, *result, info = env.step(BOX)
    assert result == [0.0, False, False]
    assert np.array_equal(after, env.render())
    assert not np.array_equal(after, screen)
    _, *result, info = env.step(DONE)
    assert result == [1.0, True, False]
    assert info == {"errors": "", "void": "", "end_reason": "AGENT_DONE", "guest_end_cause": ""}


def test_a_limit_of_steps_truncates_and_scores(desktops: DrawnDesktops) -> None:
    env = make(desktops, max_steps=1)
    env.reset()
    assert env.step(BOX)[1:4] == (1.0, False, True)
    env.close()


@pytest.mark.parametrize("action", [BOX, DONE])
def test_a_lost_machine_truncates_without_a_score(env: Any, desktops: DrawnDesktops, action: Mapping[str, Any]) -> None:
    env.reset()
    env.step(MISS)
    desktops.kill_used_machines()
    _, reward, terminated, truncated, info = env.step(action)
    assert math.isnan(reward)
    assert (terminated, truncated) == (False, True)
    assert "MACHINE_LOST" in info["void"]
    with pytest.raises(ResetNeeded):
        env.step(DONE)
    env.reset()
    assert env.step(BOX)[1] == 0.0


def test_mistakes_are_errors_of_gymnasium_and_lose_nothing(env: Any, desktops: DrawnDesktops) -> None:
    with pytest.raises(ResetNeeded):
        env.unwrapped.step(DONE)
    env.reset()
    for malformed in ({"action": "explode"}, {"x": 3}, {"action": "click", "x": "left", "y": 1}, {"action": 99}):
        with pytest.raises(InvalidAction, match="action: "):
            env.unwrapped.step(malformed)
    assert "key" in env.unwrapped.step({"action": "press", "keys": ["nokey"]})[-1]["errors"]
    assert env.step(BOX)[1:4] == (0.0, False, False)
    assert env.step(DONE)[1] == 1.0
    with pytest.raises(ResetNeeded):
        env.step(DONE)
    with pytest.raises(TaskNotFound):
        env.reset(options={"task": "fake/none"})
    desktops.wait_returned()
    with pytest.raises(ValueError, match="the screen is 1280x800; pass its size"):
        make(desktops, size=(1300, 900)).reset()


def test_a_wrong_token_is_refused(guarded_address: str) -> None:
    with pytest.raises(Unauthenticated):
        DesktopEnv(TASK, envd=guarded_address, token="wrong").reset()  # noqa: S106 -- a wrong one


def test_a_reset_in_the_middle_releases_the_machine(env: Any, desktops: DrawnDesktops) -> None:
    for task in (TASK, "fake/save-note", TASK):
        env.reset(options={"task": task})
        env.step(MISS)
    desktops.wait_until(lambda: desktops.leased_count == 1)


def test_the_seed_draws_the_task(desktops: DrawnDesktops) -> None:
    env = make(desktops, task=[TASK, "fake/save-note", "fake/count-to-five"])
    drawn = [env.reset(seed=seed)[1]["task"] for seed in (1, 2, 3, 4, 1, 2, 3, 4)]
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn)) > 1
    env.close()


def click_and_end(envs: VectorEnv[Any, Any, Any], *, x: Sequence[int], kind: str) -> dict[str, Any]:
    """Return a left click for each environment, at a height of 167, or the end of the episode."""
    count = len(x)
    given = {"action": list(KINDS).index(kind), "y": 167, "button": 0, "count": 1}
    arrays = {name: np.full(count, value) for name, value in given.items()}
    return {**envs.action_space.sample(), **arrays, "x": np.array(x), "modifiers": np.zeros((count, len(MODIFIERS)))}


def test_a_vector_in_one_process_is_a_group_from_one_state(desktops: DrawnDesktops) -> None:
    envs: VectorEnv[Any, Any, Any] = gymnasium.make_vec(
        "envd/Desktop-v0",
        num_envs=3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
        task="fake/append-line",
        envd=desktops.address,
        group_size=3,
    )
    screens, _ = envs.reset()
    episodes = [env.unwrapped._session.episode for env in envs.envs]  # type: ignore[attr-defined]
    assert len({episode.group_id for episode in episodes}) == 1
    assert all(np.array_equal(screens[0], screen) for screen in screens[1:])
    _, rewards, terminated, _, _ = envs.step(click_and_end(envs, x=(822, 5, 822), kind="done"))
    assert (rewards.tolist(), terminated.tolist()) == ([0.0] * 3, [True] * 3)
    envs.close()


@pytest.mark.long
def test_a_vector_of_processes_plays(desktops: DrawnDesktops) -> None:
    envs: VectorEnv[Any, Any, Any] = gymnasium.make_vec(
        "trainer.adapters.gymnasium:envd/Desktop-v0",
        num_envs=2,
        vectorization_mode="async",
        vector_kwargs={"context": "spawn"},
        task=TASK,
        envd=desktops.address,
    )
    try:
        envs.reset(seed=3)
        envs.step(click_and_end(envs, x=(822, 5), kind="click"))
        _, rewards, terminated, _, _ = envs.step(click_and_end(envs, x=(822, 5), kind="done"))
        assert (rewards.tolist(), terminated.tolist()) == ([1.0, 0.0], [True, True])
    finally:
        envs.close()


def test_every_sample_of_the_space_is_an_action() -> None:
    env = DesktopEnv(TASK)
    env.action_space.seed(1)
    kinds = set()
    for _ in range(300):
        (action,) = read_actions([form_of(env.action_space.sample())])
        kinds.add(type(action))
    assert len(kinds) == len(KINDS)


def test_every_key_of_the_space_is_a_key_of_the_service() -> None:
    assert [key for key in KEYS if named_key(key) is None] == []


@pytest.mark.long
async def test_the_example_on_the_page_runs(run_example: Callable[..., Awaitable[str]]) -> None:
    out = await asyncio.wait_for(run_example("Gymnasium"), 120)
    assert out.splitlines()[-1] == "1.0 True"
