"""`trainer.slime.hooks.generate` over a real socket, with doubles of slime: a sample always comes back."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuaenv.client import AsyncEnvClient, AsyncEpisode, LossUndecided
from envd.episodes.types import OpenedGroup, ResetCommand
from tests.support.counting import AGENT, PARAMS, SAY, TASK, counting, turn_in
from tests.support.guest_ends import POWER_OFF, end_guests
from tests.support.server import FakeServer, serve_fake
from tests.support.slime import IMAGE, Sample, ScriptedEngine, Tokenizer, rollout_metrics, stand_in_args, stand_in_slime
from trainer.config import InputError
from trainer.slime.hooks import generate
from trainer.slime.play.samples import facts_of, is_void
from trainer.tokens import sglang


class World:
    """A served fake, doubles of slime, and samples for them."""

    def __init__(self, server: FakeServer, engine: ScriptedEngine, state: SimpleNamespace) -> None:
        self.server = server
        self.engine = engine
        self.state = state
        self._resets: list[ResetCommand] = []
        perform = server.service.reset

        async def reset(command: ResetCommand) -> OpenedGroup:
            self._resets.append(command)
            return await perform(command)

        server.service.reset = reset

    def args(self, *, agent: dict[str, Any] | None = None, envd: dict[str, Any] | None = None, **changed: Any) -> Any:
        mapping = {"hosts": [self.server.address], "engine_timeout_s": 20.0, "engine_retries": 1}
        return stand_in_args({**mapping, **(envd or {}), "agent": {**AGENT, **(agent or {})}}, **changed)

    def lease_times_s(self) -> list[float | None]:
        """Return the lease of each reset, in order."""
        return [command.lease_ttl_s for command in self._resets]

    def reset_sizes(self) -> list[int]:
        """Return the group size of each reset, in order."""
        return [command.group_size for command in self._resets]

    def kill_machines(self) -> None:
        """Kill every machine that had input."""
        for machine in self.server.hypervisor.machines.values():
            if machine.input_count:
                machine.kill("killed by a signal")

    def kill_daemon(self) -> None:
        """Kill the daemon, as SIGKILL does."""
        self._dying = asyncio.create_task(self.server.kill())

    async def all_returned(self) -> None:
        """Wait until no machine is leased."""
        await self._until(lambda: self.server.pool.statistics().leased_count == 0)

    async def waiting(self) -> None:
        """Wait until a reset waits for a machine."""
        await self._until(lambda: self.server.pool.statistics().waiting_count > 0)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


Script = Callable[[str], str]


class once_at:  # noqa: N801 -- reads as a phrase
    """A script that solves the task, and calls `act` at a turn."""

    def __init__(self, turn: int, act: Callable[[World], object], *, times: int = 1) -> None:
        self.there: World | None = None
        self._turn, self._act, self._left = turn, act, times

    def __call__(self, prompt: str) -> str:
        if self._left and self.there and turn_in(prompt) == self._turn:
            self._left -= 1
            self._act(self.there)
        return counting(prompt)


@asynccontextmanager
async def world(say: Script = counting, *, has_vision: bool = True, **options: Any) -> AsyncIterator[World]:
    engine = ScriptedEngine(say)
    async with serve_fake(**{"size": 2, "capacity": 8, **options}) as server:
        with stand_in_slime(engine, has_vision=has_vision) as state:
            there = World(server, engine, state)
            if isinstance(say, once_at):
                say.there = there
            yield there


def group_of(count: int, *, group_index: int = 0) -> list[Sample]:
    return [
        Sample(group_index=group_index, index=group_index * 100 + member, metadata={"task_id": TASK})
        for member in range(count)
    ]


async def test_the_calls_of_an_episode_are_in_slimes_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def span(_: Sample, name: str, attributes: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], object]]:
        traced.append((name, {**attributes}))
        yield traced[-1][1].update

    monkeypatch.setattr("trainer.slime.play.rollout.span", span)
    async with world() as there:
        (sample,) = group_of(1)
        await generate(there.args(n_samples_per_prompt=1), sample, PARAMS)
    assert [name for name, _ in traced] == ["env_reset", *["env_step"] * 3, "env_evaluate"]
    assert traced[0][1] == {"task": TASK, "attempt": 1}
    assert all({"actions", "total_ms"} <= set(attributes) for name, attributes in traced if name == "env_step"), traced
    assert traced[-1][1] == {"score": 1.0}


async def test_a_sample_has_the_engines_tokens_and_the_tasks_score() -> None:
    async with world() as there:
        (sample,) = group_of(1)
        result = await generate(there.args(n_samples_per_prompt=1), sample, PARAMS)
    assert result is sample
    assert (sample.status.name, sample.reward, sample.metadata["raw_reward"]) == ("COMPLETED", 1.0, 1.0)
    said = [counting("<|im_start|>assistant\n" * turn) + "<|im_end|>" for turn in (1, 2, 3)]
    tokenizer = Tokenizer()
    trained = [
        token
        for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask or (), strict=True)
        if mask
    ]
    assert trained == [token for text in said for token in tokenizer.encode(text)]
    assert sample.weight_versions == ["7"] * 3
    assert sample.multimodal_train_inputs is not None
    grids = sample.multimodal_train_inputs["image_grid_thw"]
    assert sample.tokens.count(tokenizer.convert_tokens_to_ids(IMAGE)) == sum(h * w // 4 for _, h, w in grids)
    assert facts_of(sample)["reason"] == "done"
    assert PARAMS == {"temperature": 1.0, "max_new_tokens": 400}, "samples share these parameters"


async def test_requests_name_the_files_of_pictures_which_are_removed_at_the_end(tmp_path: Path) -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=1, envd={"picture_dir": str(tmp_path)})
        (sample,) = group_of(1)
        await generate(args, sample, PARAMS)
        addresses = [request["image_data"] for request in there.engine.requests]
    assert sample.reward == 1.0
    # The first two ask whether the engine reads files and keeps ids.
    assert [len(each) for each in addresses[-3:]] == [1, 2, 3]
    assert addresses[-1][:2] == addresses[-2]
    assert all(uri.startswith(f"file://{tmp_path}/") for uri in addresses[-1])
    assert list(tmp_path.rglob("*.png")) == []


async def test_each_prompt_extends_the_previous_one() -> None:
    async with world() as there:
        await generate(there.args(n_samples_per_prompt=1), group_of(1)[0], PARAMS)
        prompts = [request["input_ids"] for request in there.engine.requests]
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before


async def test_members_of_a_group_start_in_one_state_and_release_their_machines() -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=3)
        samples = await asyncio.gather(*(generate(args, sample, PARAMS) for sample in group_of(3)))
        assert [sample.reward for sample in samples] == [1.0] * 3
        assert len({facts_of(sample)["origin"] for sample in samples}) == 1
        assert there.reset_sizes() == [3]
        await there.all_returned()


async def test_members_that_reset_alone_complete() -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=2, envd={"group": "off"})
        await asyncio.gather(*(generate(args, sample, PARAMS) for sample in group_of(2)))
        assert there.reset_sizes() == [1, 1]


async def test_the_machine_of_a_missing_member_is_released() -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=2, envd={"group_wait_s": 0.1})
        (sample,) = group_of(1)
        await generate(args, sample, PARAMS)
        assert (sample.reward, there.reset_sizes()) == (1.0, [2])
        await there.all_returned()


async def test_a_sample_that_slime_repeats_is_reset_and_runs_alone() -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=2)
        (sample,) = group_of(1)
        sample.status, sample.tokens, sample.response_length = Sample.Status.ABORTED, [1, 2, 3], 2
        sample.loss_mask, sample.rollout_log_probs, sample.remove_sample = [1, 1], [0.0, 0.0], True
        await generate(args, sample, PARAMS)
        assert (sample.reward, sample.remove_sample, sample.status.name) == (1.0, False, "COMPLETED")
        assert there.reset_sizes() == [1]


async def test_a_group_in_which_failures_escape_keeps_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of eight members succeed; the others end their guests."""
    end_guests(monkeypatch)
    firsts = itertools.count()

    def say(prompt: str) -> str:
        is_first = "<|im_start|>assistant\n" not in prompt.removesuffix("<|im_start|>assistant\n")
        return SAY([POWER_OFF]) if is_first and next(firsts) % 2 else counting(prompt)

    async with world(say) as there:
        args = there.args(n_samples_per_prompt=8)
        samples = await asyncio.gather(*(generate(args, sample, PARAMS) for sample in group_of(8)))
        assert sum(there.reset_sizes()) == 8, "none is repeated"
        await there.all_returned()
    assert sorted(sample.reward for sample in samples) == [-0.1] * 4 + [1.0] * 4
    assert not any(map(is_void, samples))
    assert {facts_of(sample)["guest_end_cause"] for sample in samples if sample.reward < 0} == {"POWER_OFF"}
    metrics = rollout_metrics(args, samples)
    assert (metrics["success_frac"], metrics["task_score"], metrics["void_frac"]) == (0.5, 0.5, 0.0)
    assert (metrics["ended_by_guest_frac"], metrics["ended/guest_ended"]) == (0.5, 0.5)
    assert metrics["reward_part/ended_by_guest"] == pytest.approx(-0.05)
    assert metrics["zero_std_frac"] == 0.0


async def test_an_evaluation_scores_an_escape_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    end_guests(monkeypatch)
    async with world(lambda _: SAY([POWER_OFF])) as there:
        (sample,) = group_of(1)
        await generate(there.args(), sample, PARAMS, evaluation=True)
        assert (sample.status.name, sample.reward, there.reset_sizes()) == ("COMPLETED", 0.0, [1])


async def test_an_undecided_loss_is_void_counted_apart_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(*_: object, **__: object) -> None:
        raise LossUndecided("QEMU crashed", reason="LOSS_UNDECIDED")

    monkeypatch.setattr(AsyncEpisode, "step", lose)
    async with world() as there:
        (sample,) = group_of(1)
        args = there.args(n_samples_per_prompt=1)
        check_void(await generate(args, sample, PARAMS), "FAILED", "LossUndecided")
        assert there.reset_sizes() == [1]
    metrics = rollout_metrics(args, [sample])
    assert (metrics["undecided_frac"], metrics["void/LossUndecided"]) == (1.0, 1.0)


async def test_an_episode_on_a_lost_machine_is_repeated_on_a_new_one() -> None:
    async with world(once_at(2, lambda there: there.kill_machines())) as there:
        (sample,) = group_of(1)
        await generate(there.args(n_samples_per_prompt=1), sample, PARAMS)
        assert (sample.status.name, sample.reward, facts_of(sample)["attempts"]) == ("COMPLETED", 1.0, 2)
        assert facts_of(sample)["turns"] == 3, "the lost attempt is not trained on"
        await there.all_returned()


async def test_a_lost_member_of_a_group_is_repeated_alone() -> None:
    async with world(once_at(2, lambda there: there.kill_machines())) as there:
        args = there.args(n_samples_per_prompt=2)
        samples = await asyncio.gather(*(generate(args, sample, PARAMS) for sample in group_of(2)))
        assert [sample.reward for sample in samples] == [1.0, 1.0]
        first, *again = there.reset_sizes()
        assert (first, set(again)) == (2, {1})
        await there.all_returned()


@pytest.fixture
def _quick_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not try for 20 s to close an episode at a host that is gone."""
    monkeypatch.setattr("cuaenv.client.leases._CLOSE_TIMEOUT", timedelta(seconds=1))


@pytest.mark.usefixtures("_quick_closes")
async def test_a_daemon_killed_in_mid_episode_voids_the_sample() -> None:
    async with world(once_at(2, lambda there: there.kill_daemon())) as there:
        args = there.args(n_samples_per_prompt=1, agent={"step_timeout_s": 10}, envd={"attempts": 1})
        (sample,) = group_of(1)
        result = await generate(args, sample, PARAMS)
        check_void(result, "FAILED", "Unavailable")


@pytest.mark.usefixtures("_quick_closes")
async def test_an_episode_of_a_killed_host_is_repeated_on_another() -> None:
    async with serve_fake(size=2, capacity=8) as other, world() as there:

        def kill_its_host(there: World) -> None:
            if there.server.pool.statistics().leased_count == 0:
                there.server = other
            there.kill_daemon()

        there.engine.say = act = once_at(2, kill_its_host)
        act.there = there
        hosts = [there.server.address, other.address]
        args = there.args(n_samples_per_prompt=1, agent={"step_timeout_s": 10}, envd={"hosts": hosts})
        (sample,) = group_of(1)
        await generate(args, sample, PARAMS)
        assert (sample.status.name, sample.reward, facts_of(sample)["attempts"]) == ("COMPLETED", 1.0, 2)


async def test_a_failing_engine_voids_the_sample() -> None:
    def say(prompt: str) -> str:
        raise ConnectionError("engine failed")

    async with world(say) as there:
        (sample,) = group_of(1)
        check_void(await generate(there.args(n_samples_per_prompt=1), sample, PARAMS), "FAILED", "ModelFailed")
        await there.all_returned()


async def test_an_engine_that_read_another_prompt_voids_the_sample() -> None:
    async with world() as there:
        there.engine.prompt_token_error = -1
        (sample,) = group_of(1)
        check_void(await generate(there.args(n_samples_per_prompt=1), sample, PARAMS), "FAILED", "PromptMismatch")


async def test_a_sampled_image_placeholder_ends_the_episode_which_is_scored_unless_it_is_the_first_reply() -> None:
    async with world(lambda prompt: f"look: {IMAGE}") as there:
        (sample,) = group_of(1)
        check_void(await generate(there.args(n_samples_per_prompt=1), sample, PARAMS), "FAILED", "no_reply_placeholder")
    replies = iter(["WAIT"])
    async with world(lambda prompt: next(replies, f"look: {IMAGE}")) as there:
        (sample,) = group_of(1)
        ended = await generate(there.args(n_samples_per_prompt=1), sample, PARAMS)
        assert not ended.remove_sample
        assert (ended.metadata["envd"]["reason"], ended.metadata["raw_reward"]) == ("placeholder", 0.0)


class Refusal(Exception):
    """httpx's error for a response with a status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status, text=text)


@pytest.mark.parametrize(
    ("status", "text", "attempts"),
    [
        (400, "No data iterator found for token", 1),
        (500, "Internal Server Error", 3),
        (500, '{"error": {"code": "call_upstream_request_error"}}', 5),
        (503, "no engine", 5),
    ],
)
async def test_a_request_that_the_engine_refuses_is_not_repeated_for_long(
    status: int, text: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(prompt: str) -> str:
        raise Refusal(status, text)

    monkeypatch.setattr(sglang, "_PAUSE_S", 0.0)
    async with world(say) as there:
        args = there.args(n_samples_per_prompt=1, envd={"engine_retries": 5})
        check_void(await generate(args, group_of(1)[0], PARAMS), "FAILED", "ModelFailed")
        assert len(there.engine.requests) == attempts


async def test_an_engine_whose_context_is_full_truncates_the_episode() -> None:
    def say(prompt: str) -> str:
        if turn_in(prompt) == 3:
            raise Refusal(400, "Input length (99 tokens) exceeds the maximum allowed length (98 tokens).")
        return counting(prompt)

    async with world(say) as there:
        args = there.args(n_samples_per_prompt=1, envd={"engine_retries": 5})
        sample = await generate(args, group_of(1)[0], PARAMS)
        assert (sample.status.name, sample.reward) == ("TRUNCATED", 1.0)
        assert facts_of(sample)["reason"] == "total"
        assert len(there.engine.requests) == 3


async def test_an_episode_without_a_reply_is_void() -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=1, agent={"prompt_tokens": 64})
        check_void(await generate(args, group_of(1)[0], PARAMS), "FAILED", "no_reply_prompt")


async def test_an_aborted_rollout_releases_its_machines() -> None:
    async with world(once_at(2, lambda there: vars(there.state).update(aborted=True))) as there:
        args = there.args(n_samples_per_prompt=2)
        samples = await asyncio.gather(*(generate(args, sample, PARAMS) for sample in group_of(2)))
        for sample in samples:
            check_void(sample, "ABORTED", "aborted")
        await there.all_returned()


async def test_an_abort_ends_the_wait_for_a_machine() -> None:
    async with world(size=1, capacity=1) as there:
        args = there.args(n_samples_per_prompt=1)
        async with AsyncEnvClient(there.server.address) as client, client.reset(TASK):
            waiting = asyncio.create_task(generate(args, group_of(1)[0], PARAMS))
            await there.waiting()
            there.state.aborted = True
            check_void(await waiting, "ABORTED", "aborted")


async def test_a_reply_that_the_engine_aborts_at_a_weight_update_is_sampled_again() -> None:
    def say(prompt: str) -> str:
        there.engine.finish = "abort" if len(there.engine.requests) % 2 else "stop"
        return counting(prompt)

    async with world() as there:
        there.engine.say = say
        args = there.args(n_samples_per_prompt=1, envd={"engine_retries": 2})
        sample = await generate(args, group_of(1)[0], PARAMS)
        assert (sample.status.name, sample.reward, facts_of(sample)["attempts"]) == ("COMPLETED", 1.0, 1)
        assert len(there.engine.requests) == 2 * facts_of(sample)["turns"]
        assert there.reset_sizes() == [1]


async def test_an_engine_that_aborts_every_attempt_voids_the_sample() -> None:
    async with world() as there:
        there.engine.finish = "abort"
        check_void(await generate(there.args(n_samples_per_prompt=1), group_of(1)[0], PARAMS), "FAILED", "ModelFailed")


async def test_machines_are_leased_for_the_configured_time() -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=1, envd={"lease_s": 20.0})
        await generate(args, group_of(1)[0], PARAMS)
        assert there.lease_times_s() == [20.0]


async def test_an_engine_without_top_p_sets_voids_the_sample() -> None:
    async with world() as there:
        args = there.args(n_samples_per_prompt=1, rollout_top_p=0.9)
        sample = await generate(args, group_of(1)[0], PARAMS)
        check_void(sample, "FAILED", "ValueError")
        assert "the engine returned no top-p sets" in facts_of(sample)["error"]


async def test_cancellation_propagates_and_releases_the_machines() -> None:
    started = asyncio.Event()
    async with world(once_at(2, lambda there: started.set())) as there:
        args = there.args(n_samples_per_prompt=2)
        members = [asyncio.create_task(generate(args, sample, PARAMS)) for sample in group_of(2)]
        await started.wait()
        for member in members:
            member.cancel()
        with pytest.raises(asyncio.CancelledError):
            await members[0]
        await asyncio.wait(members)
        await there.all_returned()


async def test_limited_images_make_several_rows_of_one_rollout() -> None:
    async with world() as there:
        agent = {"images_per_row": 2, "images_kept": 1}
        args = there.args(n_samples_per_prompt=1, agent=agent, envd={"pad_rows_to": 4})
        rows = await generate(args, group_of(1)[0], PARAMS)
        assert [is_void(row) for row in rows] == [False, False, True, True]
        assert {row.rollout_id for row in rows} == {0}
        assert [row.reward for row in rows[:2]] == [1.0, 1.0]
        assert sum(sum(row.loss_mask) for row in rows) == facts_of(rows[0])["reply_tokens"]


async def test_a_void_rollout_is_padded_like_others() -> None:
    async with world() as there:
        there.engine.prompt_token_error = 1
        agent = {"images_per_row": 2, "images_kept": 1}
        args = there.args(n_samples_per_prompt=1, agent=agent, envd={"pad_rows_to": 4})
        rows = await generate(args, group_of(1)[0], PARAMS)
        assert [facts_of(row)["void"] for row in rows] == ["PromptMismatch", "padding", "padding", "padding"]


async def test_an_evaluation_returns_one_sample() -> None:
    async with world() as there:
        agent = {"images_per_row": 2, "images_kept": 1}
        sample = await generate(there.args(agent=agent), Sample(index=0, label=TASK), PARAMS, evaluation=True)
        assert (sample.reward, sample.rollout_id) == (1.0, None)
        assert there.reset_sizes() == [1]


async def test_text_only_needs_no_image_processor() -> None:
    async with world(has_vision=False) as there:
        agent = {"text_only": True, "a11y_tree": True}
        sample = await generate(there.args(n_samples_per_prompt=1, agent=agent), group_of(1)[0], PARAMS)
        assert (sample.reward, sample.multimodal_train_inputs) == (1.0, None)


async def test_a_misspelt_key_is_refused_before_any_reset() -> None:
    async with world() as there:
        with pytest.raises(InputError, match=r"envd\.agent\.max_turn: unknown key; did you mean max_turns"):
            await generate(there.args(agent={"max_turn": 3}), group_of(1)[0], PARAMS)
        assert there.reset_sizes() == []


def check_void(sample: Sample, status: str, reason: str) -> None:
    assert (sample.status.name, facts_of(sample)["void"]) == (status, reason)
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([0, 0], 1, [0])
    assert (sample.rollout_log_probs, sample.reward, sample.remove_sample) == ([0.0], 0.0, True)
    assert sample.multimodal_train_inputs is None
