"""The pool: limits, picks, crash-safe state, and injection into failed groups."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import InputError
from trainer.files import write_atomically
from trainer.replay import pool as pool_module
from trainer.replay.injection import inject, replaced_member
from trainer.replay.pool import PoolSettings, ReplayPool
from trainer.replay.trajectory import StoredTrajectory, TokenRow

ROW = TokenRow(tokens=(1, 2, 3), response_length=1, loss_mask=(1,), log_probs=(-0.5,))


def success(
    task_id: str, number: int = 0, *, reward: float = 1.0, sampled: bool = True, start: str = ""
) -> StoredTrajectory:
    return StoredTrajectory(
        task_id=task_id,
        start=start,
        messages=({"role": "assistant", "content": f"way {number}"},),
        reward=reward,
        rows=(ROW,) if sampled else (),
    )


def pool_of(*trajectories: StoredTrajectory, **settings: object) -> ReplayPool:
    pool = ReplayPool(PoolSettings(**settings))  # type: ignore[arg-type]
    pool.load(trajectories)
    return pool


def picks_of(pool: ReplayPool, task_id: str, count: int) -> list[str]:
    picks = [pool.pick(task_id) for _ in range(count)]
    return [pick.messages[0]["content"] for pick in picks if pick is not None]


# --- injection


@pytest.mark.parametrize(
    ("raw_rewards", "index"),
    [
        ([0.0, 0.0, 0.0, 0.0], 3),
        ([0.49, 0.2, 0.0], 2),
        ([0.0, 0.5, 0.0], None),
        ([0.0, None, 0.0, None], 1),  # a void member carries no signal
        ([None, 1.0], None),
        ([None, None], None),  # the group's result is unknown
        ([], None),
    ],
)
def test_only_a_group_that_failed_completely_gets_a_replay(raw_rewards: list[float | None], index: int | None) -> None:
    assert replaced_member(raw_rewards, success_at=0.5) == index


def test_the_raw_reward_decides() -> None:
    pool = pool_of(success("a"))
    assert inject(pool, "a", [0.0, 0.0]) is not None
    assert inject(pool, "a", [0.0, 0.5]) is None


def test_an_injection_has_the_tokens_and_the_reward_of_the_success() -> None:
    injected = inject(pool_of(success("a", reward=0.75)), "a", [0.0])
    assert injected is not None
    index, replay = injected
    assert (index, replay.rows, replay.reward) == (0, (ROW,), 0.75)


def test_a_demonstration_is_not_picked() -> None:
    """It has no log-probabilities, which a policy gradient needs."""
    pool = pool_of(success("a", sampled=False))
    assert inject(pool, "a", [0.0]) is None
    assert pool.counters.missed_count == 1


def test_injections_are_counted() -> None:
    pool = pool_of(success("a"))
    inject(pool, "a", [0.0])
    inject(pool, "a", [1.0])
    inject(pool, "b", [0.0])
    statistics = pool.statistics()
    assert statistics["replay/check_count"] == 3
    assert statistics["replay/injected_count"] == 1
    assert statistics["replay/missed_count"] == 1
    assert statistics["replay/size"] == 1


# --- picks


def test_the_seed_determines_the_picks() -> None:
    successes = [success("a", number) for number in range(8)]
    assert picks_of(pool_of(*successes, seed=1), "a", 20) == picks_of(pool_of(*successes, seed=1), "a", 20)
    assert picks_of(pool_of(*successes, seed=1), "a", 20) != picks_of(pool_of(*successes, seed=2), "a", 20)
    assert len(set(picks_of(pool_of(*successes, seed=1), "a", 60))) == 8


def test_picks_of_a_task_do_not_depend_on_other_tasks() -> None:
    successes = [success(task_id, number) for task_id in "ab" for number in range(5)]
    in_turns, one_by_one = pool_of(*successes), pool_of(*successes)
    mixed = [(picks_of(in_turns, "a", 1), picks_of(in_turns, "b", 1)) for _ in range(6)]
    b_first = (picks_of(one_by_one, "b", 6), picks_of(one_by_one, "a", 6))
    assert [pair[0][0] for pair in mixed] == b_first[1]
    assert [pair[1][0] for pair in mixed] == b_first[0]


def test_a_group_gets_only_successes_of_its_start(tmp_path: Path) -> None:
    pool = pool_of(success("a", 1, start="near the goal"), success("a_chunk1", 2, start="near the goal"))
    pool.add(success("a", 3, start="near the goal"))
    pool.save(tmp_path)
    for each in (pool, ReplayPool.resume(tmp_path, pool.settings)):
        assert inject(each, "a", [0.0]) is None
        assert inject(each, "a", [0.0], start="at the beginning") is None
        assert inject(each, "a_chunk2", [0.0]) is None
        assert inject(each, "a", [0.0], start="near the goal") is not None
        assert inject(each, "a_chunk2", [0.0], start="near the goal") is not None
        assert each.statistics()["replay/task_count"] == 2


def test_starts_of_a_task_have_limits_and_picks_of_their_own() -> None:
    pool = pool_of(*(success("a", number, start=start) for start in "xy" for number in range(3)), max_per_task=2)
    alone = pool_of(*(success("a", number, start="y") for number in range(3)), max_per_task=2)
    assert len(pool) == 4
    both = [[pool.pick("a", start) for start in "xy"] for _ in range(6)]
    assert [picked for _, picked in both] == [alone.pick("a", "y") for _ in range(6)]


def test_tasks_have_independent_picks() -> None:
    pool = pool_of(*(success(task_id, number) for task_id in "ab" for number in range(10)))
    assert picks_of(pool, "a", 10) != picks_of(pool, "b", 10)


def test_an_exact_id_takes_precedence_over_chunks_of_its_base_task() -> None:
    pool = pool_of(success("a", 1), success("a_chunk0", 2), success("a_chunk1", 3))
    assert set(picks_of(pool, "a", 20)) == {"way 1"}
    assert set(picks_of(pool, "a_chunk1", 20)) == {"way 3"}
    assert set(picks_of(pool, "a_chunk9", 40)) == {"way 1", "way 2", "way 3"}
    assert picks_of(pool, "b_chunk0", 1) == []


# --- bounds


def test_an_online_success_can_be_picked_and_a_failure_is_not_added() -> None:
    pool = pool_of()
    assert not pool.add(success("a", reward=0.49))
    assert len(pool) == 0
    assert pool.add(success("a"))
    assert len(pool) == 1
    assert picks_of(pool, "a", 1) == ["way 0"]


def test_newer_online_successes_replace_older_ones_but_not_those_from_files() -> None:
    pool = pool_of(success("a", 1), max_per_task=3)
    assert all(pool.add(success("a", number)) for number in (2, 3, 4))
    assert set(picks_of(pool, "a", 60)) == {"way 1", "way 3", "way 4"}
    assert pool.counters.displaced_count == 1


def test_a_task_that_is_full_of_successes_from_files_accepts_no_more() -> None:
    pool = pool_of(success("a", 1), success("a", 2), max_per_task=2)
    assert not pool.add(success("a", 3))
    assert pool.counters.refused_count == 1


@given(task_ids=st.lists(st.sampled_from("abcdef"), max_size=40))
def test_the_pool_never_exceeds_its_limits(task_ids: list[str]) -> None:
    pool = pool_of(*(success("a", 100 + number) for number in range(5)), max_per_task=3, max_total=7)
    for number, task_id in enumerate(task_ids):
        pool.add(success(task_id, number))
    assert len(pool) <= 7
    assert pool.statistics()["replay/size"] == len(pool)


def test_a_success_is_not_loaded_twice() -> None:
    pool = pool_of(success("a"), success("a"))
    assert pool.load([success("a")]) == 0
    assert len(pool) == 1


@pytest.mark.parametrize("settings", [{"success_at": 0.0}, {"success_at": 1.5}, {"max_per_task": 0}, {"max_total": 0}])
def test_invalid_limits_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PoolSettings(**settings)  # type: ignore[arg-type]


# --- resume


def test_a_resumed_pool_continues_with_the_same_picks(tmp_path: Path) -> None:
    pool = pool_of(*(success("a", number) for number in range(6)), seed=5)
    pool.add(success("a", 9))
    picks_of(pool, "a", 7)
    pool.save(tmp_path)
    resumed = ReplayPool.resume(tmp_path, PoolSettings(seed=5))
    assert resumed == pool
    assert picks_of(resumed, "a", 30) == picks_of(pool, "a", 30)


def test_a_directory_holds_several_states_and_unused_files_are_removed(tmp_path: Path) -> None:
    pool = pool_of(max_per_task=1)
    pool.add(success("a", 1))
    pool.save(tmp_path, name="1")
    pool.add(success("a", 2))
    pool.save(tmp_path, name="2")
    assert picks_of(ReplayPool.resume(tmp_path, pool.settings, name="1"), "a", 1) == ["way 1"]
    assert picks_of(ReplayPool.resume(tmp_path, pool.settings, name="2"), "a", 1) == ["way 2"]
    (tmp_path / "pool-1.json").unlink()
    pool.save(tmp_path, name="2")
    assert len(list((tmp_path / "trajectories").iterdir())) == 1


def test_a_success_can_be_added_while_the_pool_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread adds a success of a new task while a file is written."""
    pool = pool_of(success("a", 1), success("b", 1))

    def add_and_write(path: Path, data: bytes) -> None:
        adding = threading.Thread(target=pool.add, args=(success(path.stem, 1),))
        adding.start()
        adding.join(timeout=10)
        assert not adding.is_alive(), "add must not wait for a file"
        write_atomically(path, data)

    monkeypatch.setattr(pool_module, "write_atomically", add_and_write)
    pool.save(tmp_path)
    assert len(ReplayPool.resume(tmp_path, pool.settings)) == 2
    assert len(pool) > 2


def test_a_crash_while_saving_leaves_the_previous_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(success("a", 1))
    pool.save(tmp_path)
    pool.add(success("a", 2))

    def crash(descriptor: int) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", crash)
        with pytest.raises(OSError, match="full"):
            pool.save(tmp_path)
    assert len(ReplayPool.resume(tmp_path, pool.settings)) == 1
    pool.save(tmp_path)
    assert ReplayPool.resume(tmp_path, pool.settings) == pool


def test_a_pool_with_other_settings_or_from_another_release_is_not_resumed(tmp_path: Path) -> None:
    pool_of(success("a"), seed=1).save(tmp_path)
    with pytest.raises(InputError, match=r"saved with seed 1 \(now 2\)"):
        ReplayPool.resume(tmp_path, PoolSettings(seed=2))
    path = tmp_path / "pool-latest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(InputError, match="format 99"):
        ReplayPool.resume(tmp_path, PoolSettings(seed=1))
    with pytest.raises(FileNotFoundError):
        ReplayPool.resume(tmp_path / "nothing", PoolSettings())
