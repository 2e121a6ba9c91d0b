"""`trainer learn` on a CPU: the policy against transformers' own forward, the loss against slime's, and every stage."""

import asyncio
import base64
import io
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slime,
    pytest.mark.timeout(900),
    # Raised inside torch when slime's compiled functions are imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

SIZE_PX = (128, 96)
#: What torch says without GPU memory: its own allocator, and libraries that allocate for themselves.
NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
)


def out_of_memory(message: str) -> RuntimeError:
    import torch

    return torch.OutOfMemoryError(message) if "out of memory" in message else RuntimeError(message)


@pytest.fixture(scope="module", autouse=True)
def eager() -> None:
    """slime compiles its loss, which needs a C++ compiler."""
    import torch

    torch.compiler.set_stance("force_eager")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from trainer.learn.checkpoint import write_checkpoint
    from trainer.learn.policy import Policy

    directory = tmp_path_factory.mktemp("policy") / "model"
    write_checkpoint(directory, vocabulary=["press kite, then tick lemon"] * 4, pieces=["A constant text."])
    made = Policy(directory, device="cpu", image_px=SIZE_PX)
    made.model.eval()
    return made


@pytest.fixture
def frames() -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, SIZE_PX[1], SIZE_PX[0], 3), dtype=torch.uint8, generator=generator)


def prompts_of(policy: Any) -> list[list[int]]:
    encode = policy.tokenizer.encode
    image = [policy.image_id] * policy.image_token_count
    return [
        encode("A constant text.") + image,
        encode("press") + image + encode(" kite, then"),
        image + encode("x y 123"),
    ]


def processed(policy: Any, frame: Any) -> Any:
    from PIL import Image

    return policy.processor.image_processor(images=[Image.fromarray(frame.numpy())], return_tensors="pt")


def reference_logits(policy: Any, ids: list[int], frame: Any) -> Any:
    import torch

    row = torch.tensor([ids])
    kinds = (row == policy.image_id).int()
    with torch.no_grad():
        return policy.model(input_ids=row, mm_token_type_ids=kinds, **processed(policy, frame)).logits[0]


def test_constant_texts_and_digits_are_tokens_of_their_own(policy: Any) -> None:
    encode = policy.tokenizer.encode
    assert len(encode("A constant text.")) == 1
    assert policy.tokenizer.decode(encode("A constant text.")) == "A constant text."
    assert len(encode("123")) == 3


def test_patches_and_logits_equal_those_of_transformers(policy: Any, frames: Any) -> None:
    import torch

    # Untrained weights have zeros there.
    torch.nn.init.normal_(policy.model.model.visual.patch_embed.proj.bias, generator=torch.Generator().manual_seed(0))
    patches = policy.patches(frames)
    for frame, mine in zip(frames, patches, strict=True):
        assert torch.equal(mine, processed(policy, frame)["pixel_values"])
    rows = prompts_of(policy)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [policy.pad_id] * (longest - len(row)) for row in rows])
    places = [(index, column) for index, row in enumerate(rows) for column in range(1, len(row))]
    at = torch.tensor(places).T
    logits = policy.logits(ids, patches, (at[0], at[1])).detach()
    for (index, column), found in zip(places, logits, strict=True):
        wanted = reference_logits(policy, rows[index], frames[index])[column - 1]
        allowed = ~found.isinf()
        assert torch.allclose(found[allowed], wanted[allowed], atol=1e-4)
        assert (~allowed).sum() == 6, "special tokens that end no turn cannot be sampled"


def test_rows_that_share_an_image_have_the_logits_of_rows_with_their_own(policy: Any, frames: Any) -> None:
    import torch

    rows = prompts_of(policy)
    ids = torch.tensor([row + [policy.pad_id] * (max(map(len, rows)) - len(row)) for row in rows])
    at = torch.arange(3), torch.tensor([len(row) - 1 for row in rows])
    images = torch.tensor([1, 0, 1])
    shared = policy.logits(ids, policy.patches(frames[:2]), at, image_B=images).detach()
    own = policy.logits(ids, policy.patches(frames[images]), at).detach()
    assert torch.allclose(shared, own, atol=1e-5)


def sampled_log_probs(policy: Any, request: Any) -> Any:
    """Return the log-probabilities of the training pass at each token of a reply."""
    import torch

    columns = torch.arange(len(request.ids), len(request.ids) + len(request.reply_ids))
    ids = torch.tensor([[*request.ids, *request.reply_ids]])
    logits = policy.logits(ids, policy.patches(request.frame_HW3[None]), (torch.zeros_like(columns), columns)).detach()
    return torch.log_softmax(logits, dim=-1)


def test_requests_that_join_and_leave_get_the_log_probs_of_the_training_pass(policy: Any, frames: Any) -> None:
    """Two slots, six prompts of different lengths; the last needs more room than was there."""
    import torch

    from trainer.learn.sampler import ReplySampler, SamplerRequest

    rows = [*prompts_of(policy), *prompts_of(policy)]
    rows[5] = [*rows[5], *policy.tokenizer.encode("a longer prompt, letter by letter " * 8)]
    waiting = [
        SamplerRequest(ids=row, frame_HW3=frames[index % 3], limit=3 + index, temperature=float(index % 2))
        for index, row in enumerate(rows)
    ]
    sampler = ReplySampler(policy, generator=torch.Generator().manual_seed(1), slot_count=2)
    ended: list[Any] = []
    while waiting or sampler.running_count:
        if waiting and sampler.free_count:
            ended += sampler.add([waiting.pop(0)])
        ended += sampler.step()
    assert len(ended) == 6
    for request in ended:
        assert len(request.reply_ids) == request.limit or request.is_complete
        table = sampled_log_probs(policy, request)
        found = [float(table[index, token]) for index, token in enumerate(request.reply_ids)]
        assert found == pytest.approx(request.log_probs, abs=1e-4)
        if not request.temperature:
            assert table.argmax(-1).tolist() == request.reply_ids


def test_prompts_with_one_picture_are_read_together(policy: Any, frames: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trainer.learn.sampler import ReplySampler, SamplerRequest

    counts: list[int] = []
    patches = policy.patches

    def counted(frames: Any) -> Any:
        counts.append(len(frames))
        return patches(frames)

    monkeypatch.setattr(policy, "patches", counted)
    first, second = frames[0], frames[1]
    given = zip(prompts_of(policy), (first, second, first), (1, 2, 1), strict=True)
    prompts = [
        SamplerRequest(ids=ids, frame_HW3=frame, limit=3, temperature=1.0, picture=picture)
        for ids, frame, picture in given
    ]
    sampler = ReplySampler(policy, generator=torch.Generator().manual_seed(1), slot_count=3)
    ended = sampler.add(prompts)
    while sampler.running_count:
        ended += sampler.step()
    assert counts == [2], "the first and the third are one picture"
    assert len(ended) == 3
    for request in ended:
        table = sampled_log_probs(policy, request)
        found = [float(table[index, token]) for index, token in enumerate(request.reply_ids)]
        assert found == pytest.approx(request.log_probs, abs=1e-4)


def test_tokens_are_sampled_as_often_as_their_probabilities_say() -> None:
    """Chi-squared over five tokens, one of which is suppressed; the generator has a seed."""
    import torch

    from trainer.learn.sampler import choose

    count, temperature = 20_000, 0.5
    logits = torch.tensor([1.0, 0.2, -torch.inf, 0.9, -0.5])
    tokens, log_probs = choose(
        logits.expand(count, 5), torch.full((count,), temperature), torch.Generator().manual_seed(2)
    )
    wanted = torch.softmax(logits / temperature, dim=-1)
    assert torch.allclose(log_probs.exp(), wanted[tokens])
    observed, expected = torch.bincount(tokens, minlength=5), wanted * count
    assert observed[2] == 0
    possible = expected > 0
    chi_squared = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert float(chi_squared) < 16.3, "p = 0.001 with 3 degrees of freedom"


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    from trainer.learn import LearnError
    from trainer.learn.policy import Policy

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(LearnError, match="its model is gpt2, and only qwen3_vl learns here"):
        Policy(tmp_path, device="cpu", image_px=SIZE_PX)
    with pytest.raises(LearnError, match="cannot be read"):
        Policy(tmp_path / "missing", device="cpu", image_px=SIZE_PX)


# The loss


def rows_of_two_rollouts() -> tuple[list[Any], list[Any]]:
    """Return rows of lengths 2, 1 and 3, of which the first two are one rollout, and new log-probabilities."""
    import torch

    from trainer.learn.loss import TrainRow

    old = [[-0.5, -1.0], [-0.2], [-2.0, -0.1, -0.7]]
    rows = [
        TrainRow(
            tokens=[1, *range(len(each))],
            response_length=len(each),
            loss_mask=[1] * len(each),
            log_probs=each,
            advantages=[advantage] * len(each),
            rollout_mask_sum=3,
            image=0,
        )
        for each, advantage in zip(old, (1.5, 1.5, -0.5), strict=True)
    ]
    shifts = ([0.4, -0.1], [0.3], [-0.6, 0.2, 0.0])
    new = [torch.tensor(each) + torch.tensor(shift) for each, shift in zip(old, shifts, strict=True)]
    return rows, new


CLIPS: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.28}


def weights_of(rows: list[Any], *, per_token: bool, count: int) -> Any:
    import torch

    from trainer.learn.loss import token_weights

    return token_weights(rows, per_token=per_token, count=count, device=torch.device("cpu"))


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_the_loss_is_slimes_mean_over_tokens_or_over_rollouts(estimator: str) -> None:
    import torch
    from slime.utils import ppo_utils

    from trainer.learn.loss import policy_loss

    rows, new = rows_of_two_rollouts()
    old = [torch.tensor(row.log_probs) for row in rows]
    masks = [torch.ones_like(each) for each in old]
    kl = ppo_utils.compute_gspo_kl(new, old, new, masks) if estimator == "gspo" else torch.cat(old) - torch.cat(new)
    advantages = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5, -0.5])
    by_token, _ = ppo_utils.compute_policy_loss(kl, advantages, 0.2, 0.28)
    for per_token, count, wanted in (
        (True, 6, by_token.mean()),
        (False, 2, (by_token[:3].mean() + by_token[3:].mean()) / 2),
    ):
        weights = weights_of(rows, per_token=per_token, count=count)
        loss, _ = policy_loss(rows, new, weights, estimator=estimator, **CLIPS)
        assert float(loss) == pytest.approx(float(wanted))


def rows_of_lengths() -> tuple[list[Any], list[Any]]:
    """Return rollouts of 1 and 3 trained tokens, with advantages 1 and -1, under the policy that sampled them."""
    import torch

    from trainer.learn.loss import TrainRow

    masks = [[0, 1], [1, 1, 1]]
    rows = [
        TrainRow(
            tokens=[1, *mask],
            response_length=len(mask),
            loss_mask=mask,
            log_probs=[-0.5] * len(mask),
            advantages=[advantage] * len(mask),
            rollout_mask_sum=sum(mask),
            image=0,
        )
        for mask, advantage in zip(masks, (1.0, -1.0), strict=True)
    ]
    return rows, [torch.tensor(row.log_probs) for row in rows]


def test_by_tokens_a_rollout_of_three_tokens_counts_three_times_as_much_as_one_of_one() -> None:
    """The ratio is 1 everywhere, so the loss of a token is its negative advantage."""
    from trainer.learn.loss import policy_loss, trained_tokens

    rows, new = rows_of_lengths()
    assert trained_tokens(rows) == 4
    by_token = weights_of(rows, per_token=True, count=4)
    assert by_token.tolist() == [0.0, 0.25, 0.25, 0.25, 0.25]
    # (-1 + 1 + 1 + 1) / 4
    assert float(policy_loss(rows, new, by_token, estimator="grpo", **CLIPS)[0]) == pytest.approx(0.5)
    by_rollout = weights_of(rows, per_token=False, count=2)
    assert by_rollout.tolist() == pytest.approx([0.0, 1 / 2, 1 / 6, 1 / 6, 1 / 6])
    # (-1 + (1 + 1 + 1) / 3) / 2
    assert float(policy_loss(rows, new, by_rollout, estimator="grpo", **CLIPS)[0]) == pytest.approx(0.0, abs=1e-6)


def test_a_learner_weighs_the_tokens_of_a_step_by_its_setting(
    policy: Any, frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward passes of one row each."""
    from dataclasses import replace

    from trainer.learn import loss, reinforce
    from trainer.learn.settings import SMOKE
    from trainer.learn.workers import Batch

    rows = [replace(row, tokens=[*prompts_of(policy)[0], *row.tokens[1:]]) for row in rows_of_lengths()[0]]
    batch = Batch(rows=rows, rollout_count=2, patches=list(policy.patches(frames)))
    nothing: Any = Discarded()
    seen: list[list[float]] = []

    def recorded(rows: Any, log_probs: Any, weights: Any, **options: Any) -> Any:
        seen.append(weights.tolist())
        return loss.policy_loss(rows, log_probs, weights, **options)

    monkeypatch.setattr(reinforce, "policy_loss", recorded)
    # No step: other tests have the same policy.
    monkeypatch.setattr(reinforce, "train_step", lambda model, *_, **__: model.zero_grad() or 0.0)
    for per_token, wanted in ((True, [[0, 1 / 4], [1 / 4] * 3]), (False, [[0, 1 / 2], [1 / 6] * 3])):
        options = {"per_token_loss": per_token, "micro_rows": 1, "steps_per_rollout": 1}
        settings = SMOKE.model_copy(update={"rl": SMOKE.rl.model_copy(update=options)})
        learner = reinforce.Learner(policy, nothing, nothing, settings=settings, directory=tmp_path, log=nothing)
        seen.clear()
        learner._train(batch)
        assert sorted(seen, key=len) == [pytest.approx(each) for each in wanted]


def test_rows_of_one_screen_that_lie_apart_share_a_forward_pass_which_encodes_it_once(
    policy: Any, frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from trainer.learn.reinforce import Learner
    from trainer.learn.settings import SMOKE

    row = rows_of_lengths()[0][0]
    texts = prompts_of(policy)
    # In this order, each pass of two rows would encode two screens.
    rows = [replace(row, tokens=[*texts[image], *row.tokens[1:]], image=image) for image in [0, 1, 2] * 2]
    settings = SMOKE.model_copy(update={"rl": SMOKE.rl.model_copy(update={"micro_rows": 2})})
    nothing: Any = Discarded()
    learner = Learner(policy, nothing, nothing, settings=settings, directory=tmp_path, log=nothing)
    encoded: list[int] = []
    encode = policy._encode_images

    def counted(patches_BPV: Any) -> Any:
        encoded.append(len(patches_BPV))
        return encode(patches_BPV)

    monkeypatch.setattr(policy, "_encode_images", counted)
    try:
        learner._gradient(rows, list(policy.patches(frames)), count=len(rows))
    finally:
        policy.model.zero_grad(set_to_none=True)
    assert encoded == [1, 1, 1]


@pytest.mark.parametrize("message", NO_MEMORY)
def test_without_gpu_memory_a_forward_pass_has_fewer_rows(
    message: str, policy: Any, frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    import torch

    from trainer.learn import LearnError
    from trainer.learn.reinforce import Learner
    from trainer.learn.settings import SMOKE

    row = rows_of_lengths()[0][0]
    tokens = [*prompts_of(policy)[0], *policy.tokenizer.encode("12")]
    rows = [replace(row, tokens=tokens, image=image) for image in (0, 0, 1, 2)]
    settings = SMOKE.model_copy(update={"rl": SMOKE.rl.model_copy(update={"micro_rows": 2})})
    nothing: Any = Discarded()
    learner = Learner(policy, nothing, nothing, settings=settings, directory=tmp_path, log=nothing)
    most = 1
    encode = policy._encode_images

    held: list[Any] = []

    def encode_few(patches_BPV: Any) -> Any:
        if len(patches_BPV) > most:
            held.append(weakref.ref(patches_BPV))
            raise out_of_memory(message)
        return encode(patches_BPV)

    def give_back() -> None:
        assert [tensor() for tensor in held] == [None], "memory of the pass that failed cannot be given back yet"

    monkeypatch.setattr(policy, "_encode_images", encode_few)
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    patches = list(policy.patches(frames))

    def gradient() -> tuple[dict[str, float], Any]:
        policy.model.zero_grad(set_to_none=True)
        sums = learner._gradient(rows, patches, count=4)
        return sums, torch.cat([each.grad.flatten() for each in policy.model.parameters() if each.grad is not None])

    try:
        # The second pass fails: what the first added counts once.
        (sums, grad), (wanted, wanted_grad) = gradient(), gradient()
        assert learner._micro_rows == 1
        assert sums == wanted
        assert torch.equal(grad, wanted_grad)
        assert grad.norm() > 0
        most = 0
        with pytest.raises(LearnError, match="no GPU memory for one row"):
            gradient()
    finally:
        policy.model.zero_grad(set_to_none=True)


def test_the_gradient_does_not_depend_on_how_rows_are_split() -> None:
    import torch

    from trainer.learn.loss import policy_loss

    rows, new = rows_of_two_rollouts()

    def loss(*chosen: int) -> Any:
        part = [rows[index] for index in chosen]
        weights = weights_of(part, per_token=True, count=6)
        return policy_loss(part, [new[index] for index in chosen], weights, estimator="grpo", **CLIPS)[0]

    assert float(loss(0, 1, 2)) == pytest.approx(float(torch.stack([loss(0), loss(1, 2)]).sum()))


def test_rows_without_an_advantage_or_a_trained_token_are_left_out() -> None:
    from trainer.learn.loss import trained_rows

    data: dict[str, Any] = {"rewards": [0.0, 1.0, -1.0], "loss_masks": [[1], [0, 0], [0, 1]]}
    assert trained_rows(data) == [2]


class Bandit:
    """Rollouts of fixed prompts by the real sampler, in place of the rollout processes; a reply is one token."""

    def __init__(self, policy: Any, frames: Any, wanted: list[set[int]]) -> None:
        """Take the rewarded tokens of each prompt."""
        import torch

        self.policy, self.frames, self.wanted = policy, frames, wanted
        self.generator = torch.Generator().manual_seed(0)
        self.success: list[float] = []

    def rollout(self, number: int, **_: Any) -> Any:
        from trainer.learn.loss import TrainRow
        from trainer.learn.sampler import ReplySampler, SamplerRequest
        from trainer.learn.workers import Batch
        from trainer.rewards.groups import group_advantages

        made = Batch(patches=list(self.policy.patches(self.frames)))
        rewards = []
        for place, (ids, wanted) in enumerate(zip(prompts_of(self.policy), self.wanted, strict=True)):
            frame = self.frames[place]
            prompts = [SamplerRequest(ids=ids, frame_HW3=frame, limit=1, temperature=1.0) for _ in range(16)]
            replies = ReplySampler(self.policy, generator=self.generator, slot_count=16).add(prompts)
            group = [float(reply.reply_ids[0] in wanted) for reply in replies]
            for reply, advantage in zip(replies, group_advantages(group), strict=True):
                made.rows.append(
                    TrainRow(
                        tokens=[*ids, *reply.reply_ids],
                        response_length=1,
                        loss_mask=[1],
                        log_probs=reply.log_probs,
                        advantages=[advantage],
                        rollout_mask_sum=1,
                        image=place,
                    )
                )
            rewards += group
        self.success.append(sum(rewards) / len(rewards))
        made.rows = [row for row in made.rows if any(row.advantages)]
        made.rollout_count = len(made.rows)
        return made


class Discarded:
    """The engine and the log of a learner whose rollouts need neither."""

    weight_version = 0

    def check(self) -> None:
        pass

    def write(self, *_: Any) -> None:
        pass


def bandit(frames: Any, tmp_path: Path, *, learning_rate: float) -> tuple[Any, Bandit]:
    """Return a learner and its rollouts; half of the vocabulary is rewarded, another half for each prompt."""
    from trainer.learn.checkpoint import write_checkpoint
    from trainer.learn.policy import Policy
    from trainer.learn.reinforce import Learner
    from trainer.learn.settings import SMOKE

    policy = Policy(write_checkpoint(tmp_path / "model", pieces=["A constant text."]), device="cpu", image_px=SIZE_PX)
    tokens = range(len(policy.tokenizer))
    wanted = [{token for token in tokens if token % 2 == rest} for rest in (0, 1)]
    wanted.append({token for token in tokens if token // 2 % 2})
    rollouts = Bandit(policy, frames, wanted)
    settings = SMOKE.model_copy(update={"rl": SMOKE.rl.model_copy(update={"learning_rate": learning_rate})})
    nothing: Any = Discarded()
    workers: Any = rollouts
    return Learner(policy, nothing, workers, settings=settings, directory=tmp_path, log=nothing), rollouts


def test_an_update_favours_replies_by_their_advantages(frames: Any, tmp_path: Path) -> None:
    import torch

    # Small steps: a large one for one prompt also changes the replies to others.
    learner, rollouts = bandit(frames, tmp_path, learning_rate=1e-4)
    batch = rollouts.rollout(0)
    rollouts.rollout = lambda *_, **__: batch  # type: ignore[method-assign]

    def log_probs() -> Any:
        ids = [torch.tensor([row.tokens]) for row in batch.rows]
        at = [(torch.tensor([0]), torch.tensor([len(row.tokens) - 1])) for row in batch.rows]
        found = [
            learner.policy.logits(row_ids, batch.patches[row.image][None], place).detach().log_softmax(-1)
            for row, row_ids, place in zip(batch.rows, ids, at, strict=True)
        ]
        return torch.stack([each[0, row.tokens[-1]] for each, row in zip(found, batch.rows, strict=True)])

    before = log_probs()
    sampled = torch.tensor([row.log_probs[0] for row in batch.rows])
    assert torch.allclose(before, sampled, atol=1e-4), "the training pass gives the sampler's log-probabilities"
    learner.update()
    change = log_probs() - before
    advantages = torch.tensor([row.advantages[0] for row in batch.rows])
    assert (change * advantages).sum() > 0
    assert change[advantages > 0].mean() > 0 > change[advantages < 0].mean()


def test_updates_on_fixed_prompts_raise_their_success(frames: Any, tmp_path: Path) -> None:
    """The whole path: each rollout samples with the weights of the update before it."""
    learner, rollouts = bandit(frames, tmp_path, learning_rate=3e-3)
    for _ in range(25):
        learner.update()
    assert rollouts.success[0] < 0.8
    assert min(rollouts.success[-3:]) > 0.9, rollouts.success


# The engine


@pytest.fixture
def engine(policy: Any) -> Iterator[Any]:
    from trainer.learn.engine import PolicyEngine

    with PolicyEngine(policy, seed=0, port_count=2, max_running=8) as running:
        yield running


def request_of(policy: Any, frame: Any) -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame.numpy()).save(buffer, "PNG")
    return {
        "input_ids": [*policy.tokenizer.encode("press"), policy.image_id],
        "image_data": [f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"],
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0},
    }


async def ask(engine: Any, payload: Any, *, port: int = 0) -> tuple[int, Any]:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        url = f"http://{engine.host}:{engine.ports[port]}/generate"
        async with session.post(url, json=payload) as response:
            return response.status, await (response.json() if response.status == 200 else response.text())


def test_the_engine_answers_many_requests_as_sglang_does(policy: Any, engine: Any, frames: Any) -> None:
    async def ask_all() -> list[tuple[int, Any]]:
        payloads = [request_of(policy, frames[index % 3]) for index in range(7)]
        return await asyncio.gather(*(ask(engine, each, port=index % 2) for index, each in enumerate(payloads)))

    for status, answer in asyncio.run(ask_all()):
        assert status == 200
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == len(policy.tokenizer.encode("press")) + policy.image_token_count
        assert 1 <= meta["completion_tokens"] == len(meta["output_token_logprobs"]) <= 4
        assert meta["finish_reason"]["type"] in ("stop", "length")


def test_equal_pictures_of_requests_are_encoded_once(
    policy: Any, engine: Any, frames: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    patches = policy.patches

    def counted(frames_BHW3: Any) -> Any:
        counts.append(len(frames_BHW3))
        return patches(frames_BHW3)

    async def ask_all() -> list[tuple[int, Any]]:
        # Each port belongs to a process of its own.
        chosen = (frames[0], frames[0].clone(), frames[1])
        asked = ((request_of(policy, frame), port) for frame in chosen for port in range(2))
        return await asyncio.gather(*(ask(engine, payload, port=port) for payload, port in asked))

    monkeypatch.setattr(policy, "patches", counted)
    monkeypatch.setattr("trainer.learn.engine._GATHER_S", 2.0)
    assert [status for status, _ in asyncio.run(ask_all())] == [200] * 6
    assert counts == [2]


def test_a_served_process_that_ended_is_reported_to_the_learner(policy: Any, frames: Any) -> None:
    import multiprocessing
    import time

    from trainer.learn import LearnError
    from trainer.learn.engine import PolicyEngine

    with PolicyEngine(policy, seed=0, max_running=2) as engine:
        assert asyncio.run(ask(engine, request_of(policy, frames[0])))[0] == 200
        (front,) = multiprocessing.active_children()
        front.kill()
        front.join()
        for _ in range(100):
            if engine.failure:
                break
            time.sleep(0.05)
        with pytest.raises(LearnError, match="engine: a process that serves it ended"):
            engine.check()


def test_a_request_without_its_image_is_refused(policy: Any, engine: Any, frames: Any) -> None:
    payload = {**request_of(policy, frames[0]), "image_data": []}
    status, text = asyncio.run(ask(engine, payload))
    assert (status, "set images_per_row to 1" in text) == (400, True)


def test_an_engine_that_fails_says_so_to_requests_and_to_the_learner(
    policy: Any, engine: Any, frames: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.learn import LearnError

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(policy, "next_logits", fail)
    for _ in range(2):
        status, text = asyncio.run(ask(engine, request_of(policy, frames[0])))
        assert (status, "device lost" in text) == (400, True)
    with pytest.raises(LearnError, match="device lost; continue from the last checkpoint with `--resume`"):
        engine.check()


@pytest.mark.parametrize("message", NO_MEMORY)
def test_without_gpu_memory_the_engine_reads_fewer_prompts_at_once(
    message: str, policy: Any, engine: Any, frames: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    sizes: list[int] = []
    held: list[Any] = []
    hidden = policy.hidden

    def read_one(ids: Any, patches: Any, **options: Any) -> Any:
        sizes.append(len(ids))
        if len(ids) > 1:
            held.append(weakref.ref(patches))
            raise out_of_memory(message)
        return hidden(ids, patches, **options)

    given_back: list[Any] = []
    monkeypatch.setattr(policy, "hidden", read_one)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.extend(tensor() for tensor in held))

    async def ask_all() -> list[tuple[int, Any]]:
        return await asyncio.gather(*(ask(engine, request_of(policy, frames[0])) for _ in range(5)))

    assert [status for status, _ in asyncio.run(ask_all())] == [200] * 5
    assert sizes.count(1) == 5
    # Memory of a pass that failed could be given back.
    assert given_back
    assert not any(tensor is not None for tensor in given_back)


# States


def test_a_state_is_continued_only_with_equal_settings_and_on_request(policy: Any, tmp_path: Path) -> None:
    from trainer.learn import LearnError
    from trainer.learn.settings import SMOKE, Clone
    from trainer.learn.states import RunState, load_state, make_optimizer, save_state

    optimizer = make_optimizer(policy.model, learning_rate=1e-3)
    assert load_state(tmp_path, SMOKE, stage="clone") is None
    save_state(tmp_path, RunState.of(policy.model, optimizer, SMOKE, stage="clone", done=7))
    state = load_state(tmp_path, SMOKE, stage="clone")
    assert state is not None
    assert state.done == 7
    with pytest.raises(LearnError, match="add --resume"):
        load_state(tmp_path, SMOKE, stage="clone", resume=False)
    other = SMOKE.model_copy(update={"clone": Clone(steps=9, batch=16)})
    with pytest.raises(LearnError, match=r"clone.batch was 8 and is 16"):
        load_state(tmp_path, other, stage="clone")
    (tmp_path / "state.pt").write_bytes(b"cut off")
    with pytest.raises(LearnError, match="restore or remove it"):
        load_state(tmp_path, SMOKE, stage="clone")


def test_a_state_of_release_0_2_0_is_continued_unless_its_rollouts_were_those_of_an_arm(
    policy: Any, tmp_path: Path
) -> None:
    from dataclasses import replace

    from trainer.learn import LearnError
    from trainer.learn.settings import SMOKE
    from trainer.learn.states import RunState, load_state, make_optimizer, save_state

    now = RunState.of(policy.model, make_optimizer(policy.model, learning_rate=1e-3), SMOKE, stage="rl", done=7)
    options = {name: value for name, value in now.settings["rl"].items() if name not in ("slime", "per_token_loss")}
    options |= {"group_start": "forked", "fault_share": 0.0, "faults_as_zero": False, "escapes_as_void": False}
    save_state(tmp_path, replace(now, settings={**now.settings, "rl": options}))
    by_rollout = SMOKE.model_copy(update={"rl": SMOKE.rl.model_copy(update={"per_token_loss": False})})
    assert load_state(tmp_path, by_rollout, stage="rl") is not None
    with pytest.raises(LearnError, match=r"rl.per_token_loss was null and is true"):
        load_state(tmp_path, SMOKE, stage="rl")
    save_state(tmp_path, replace(now, settings={**now.settings, "rl": {**options, "fault_share": 0.1}}))
    with pytest.raises(LearnError, match=r"rl.fault_share was 0.1 and is null"):
        load_state(tmp_path, by_rollout, stage="rl")


def test_a_gradient_that_is_not_finite_changes_no_weight(policy: Any) -> None:
    import torch

    from trainer.learn import LearnError
    from trainer.learn.states import make_optimizer, train_step

    optimizer = make_optimizer(policy.model, learning_rate=1e-3)
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    loss = policy.model.get_input_embeddings().weight.sum() * float("nan")
    with pytest.raises(LearnError, match="step 3: the gradient is not finite"):
        train_step(policy.model, optimizer, loss, learning_rate=1e-3, what="step 3")
    policy.model.zero_grad(set_to_none=True)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))


def test_tasks_need_a_held_out_split() -> None:
    from trainer.learn import LearnError
    from trainer.learn.settings import HELD_OUT_SEED, SMOKE
    from trainer.learn.workers import task_ids

    train, held_out = task_ids({"drawn/press": "train", "drawn/close-press": "held_out"}, settings=SMOKE)
    assert {each.partition("?")[0] for each in train} == {"drawn/press"}
    assert held_out == [f"drawn/close-press?seed={HELD_OUT_SEED}", f"drawn/press?seed={HELD_OUT_SEED}"]
    none = SMOKE.model_copy(update={"held_out_variants": 0})
    with pytest.raises(LearnError, match="4 to train on and 0 held out"):
        task_ids({"drawn/press": "train"}, settings=none)


def test_fixed_tasks_replace_the_training_tasks() -> None:
    from trainer.learn import LearnError
    from trainer.learn.settings import Settings
    from trainer.learn.workers import task_ids

    def ids(tasks: list[str]) -> tuple[list[str], list[str]]:
        rl = {"tasks": tasks, "groups": 3, "train_seeds": 2}
        settings = Settings.model_validate({"held_out_variants": 0, "held_out_template_variants": 0, "rl": rl})
        return task_ids({"drawn/press": "train", "drawn/drag": "train", "drawn/tick": "held_out"}, settings=settings)

    assert ids(["drawn/press?seed=7"]) == (["drawn/press?seed=7"] * 3, []), "repeated, so that each group has one"
    assert ids(["drawn/press?seed=7", "drawn/drag"])[0] == [
        "drawn/press?seed=7",
        "drawn/drag?seed=0",
        "drawn/drag?seed=1",
    ]
    settings = Settings.model_validate({"held_out_variants": 1, "rl": {"tasks": ["drawn/press"], "train_seeds": 2}})
    _, held_out = task_ids({"drawn/press": "train", "drawn/drag": "train"}, settings=settings)
    assert held_out == ["drawn/press?seed=1000000000"], "no variant of a template that is not trained"
    for unknown in ("drawn/tick", "drawn/pressed?seed=1"):
        with pytest.raises(LearnError, match="not a training template; choose from drawn/drag, drawn/press"):
            ids([unknown])


def test_validation_variants_are_neither_trained_nor_held_out() -> None:
    from trainer.learn.settings import VALIDATION_SEED, Settings
    from trainer.learn.workers import task_ids, validation_ids

    rl = {"tasks": ["drawn/press", "drawn/tick?seed=3"], "train_seeds": 50}
    settings = Settings.model_validate({"held_out_variants": 50, "validation_variants": 2, "rl": rl})
    splits = {"drawn/press": "train", "drawn/tick": "train", "drawn/drag": "train", "drawn/mix": "held_out"}
    train, held_out = task_ids(splits, settings=settings)
    played = validation_ids(train, settings=settings)
    assert played == [f"drawn/{name}?seed={VALIDATION_SEED + seed}" for name in ("press", "tick") for seed in range(2)]
    assert not set(played) & {*train, *held_out}


def test_each_process_plays_all_templates() -> None:
    from trainer.data.split import template_id
    from trainer.learn.settings import Settings
    from trainer.learn.workers import shuffled_shares, task_ids

    splits = {f"drawn/template-{number}": "train" for number in range(16)} | {"drawn/mix": "held_out"}
    train, _ = task_ids(splits, settings=Settings.model_validate({"rl": {"train_seeds": 50}}))
    shares = shuffled_shares(train, count=8, seed=1)
    assert {len({template_id(task) for task in share}) for share in shares} == {16}
    assert sorted(task for share in shares for task in share) == sorted(train)
    assert shares == shuffled_shares(train, count=8, seed=1), "a continued run has the same"


# The end of cloning


def test_a_policy_is_measured_by_its_chance_to_say_the_reply_and_by_its_entropy() -> None:
    """Two rows, of one and two tokens, of a vocabulary of two and a suppressed token."""
    from types import SimpleNamespace

    import numpy as np
    import torch

    from trainer.learn.clone import check

    chances = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    batch = {"ids": None, "patches": None, "rows": torch.tensor([0, 1, 1]), "columns": None}
    batch["targets"] = torch.tensor([0, 0, 0])
    policy: Any = SimpleNamespace(logits=lambda *_: chances.log())
    found = check(policy, lambda _: batch, np.arange(2))
    # The first reply is said in one of two cases, and the second in 0.9 x 0.2 = 0.18.
    assert found["sampled_right_replies"] == pytest.approx((0.5 + 0.18) / 2)
    assert found["right_replies"] == 0.5
    # ln 2, and -(0.9 ln 0.9 + 0.1 ln 0.1) and -(0.2 ln 0.2 + 0.8 ln 0.8).
    assert found["entropy"] == pytest.approx((0.6931 + 0.3251 + 0.5004) / 3, abs=1e-4)
    assert found["checked_loss"] == pytest.approx((0.6931 + 0.1054 + 1.6094) / 3, abs=1e-4)


def test_smoothing_spreads_a_share_of_the_target_over_tokens_that_can_be_said() -> None:
    import torch

    from trainer.learn.clone import reply_loss

    logits = torch.tensor([[0.8, 0.2, 0.0]]).log()
    target = torch.tensor([0])
    assert float(reply_loss(logits, target, smoothing=0.0)) == pytest.approx(0.2231, abs=1e-4)
    # -0.9 ln 0.8 - 0.1 (ln 0.8 + ln 0.2) / 2
    assert float(reply_loss(logits, target, smoothing=0.1)) == pytest.approx(0.2008 + 0.0916, abs=1e-4)


def measured(success: float, *, entropy: float = 0.5, episodes: bool = True) -> dict[str, float]:
    rows = {"right_replies": 0.3, "sampled_right_replies": 0.01 if episodes else success, "entropy": entropy}
    return {**rows, "success_frac": success} if episodes else rows


def test_cloning_ends_at_the_wanted_success_or_before_the_policy_is_certain() -> None:
    from trainer.learn.clone import is_enough
    from trainer.learn.settings import Clone

    options = Clone(sampled_success=(0.1, 0.4), min_entropy=0.3)
    for episodes in (True, False):
        assert not is_enough(options, measured(0.05, episodes=episodes))
        assert is_enough(options, measured(0.1, episodes=episodes))
    assert is_enough(options, measured(0.05, entropy=0.29))
    assert not is_enough(Clone(), measured(0.9, entropy=0.0))
    assert is_enough(Clone(stop_at=0.3), measured(0.0))


def test_a_policy_is_measured_after_the_warm_up_and_at_the_end() -> None:
    from trainer.learn.clone import is_due
    from trainer.learn.settings import Clone

    options = Clone(steps=19, warmup_steps=12, check_every=4)
    assert [done for done in range(1, 20) if is_due(options, done)] == [12, 16, 19]
    assert is_due(Clone(steps=4, warmup_steps=10, check_every=2), 4), "also if the warm-up has not ended"


def test_a_policy_that_succeeds_too_rarely_or_too_often_is_refused_with_the_remedy() -> None:
    from trainer.learn import LearnError
    from trainer.learn.clone import require_success
    from trainer.learn.settings import Clone

    options = Clone(sampled_success=(0.1, 0.4))
    for success in (0.1, 0.4):
        require_success(options, measured(success), done=7)
    with pytest.raises(LearnError, match=r"0.05 after 7 steps.*outside of .*\(0.1 to 0.4\); clone for longer"):
        require_success(options, measured(0.05), done=7)
    with pytest.raises(LearnError, match=r"0.41 after 7 steps.*measure more often"):
        require_success(options, measured(0.41, episodes=False), done=7)


# Processes that roll out


def test_equal_images_of_rows_are_sent_once() -> None:
    import torch

    from trainer.learn.workers import distinct_images

    one, other = torch.zeros(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)
    distinct, places = distinct_images([one, other, one.clone(), other])
    assert places == [0, 1, 0, 1]
    assert torch.equal(torch.stack(distinct), torch.stack([one, other]))


def test_groups_of_two_processes_are_not_counted_as_one() -> None:
    from trainer.learn.workers import of_process
    from trainer.slime.monitor import EpisodeRecord, metrics_of

    def record(group_index: int, reward: float) -> EpisodeRecord:
        return EpisodeRecord(index=0, group_index=group_index, reward=reward, facts={}, surprise=0.0, sampled_count=0)

    of_both = [[record(0, 0.0), record(0, 0.0)], [record(0, 1.0), record(0, 1.0)]]
    joined = [each for index, records in enumerate(of_both) for each in of_process(records, index, count=2)]
    assert metrics_of(joined)["zero_std_frac"] == 1.0
    assert metrics_of([each for records in of_both for each in records])["zero_std_frac"] == 0.0


def test_a_process_that_cannot_start_or_is_killed_is_named_with_the_remedy(tmp_path: Path) -> None:
    from multiprocessing import active_children

    from trainer.learn import LearnError
    from trainer.learn.settings import SMOKE
    from trainer.learn.workers import RolloutProcesses, WorkerSpec

    spec = WorkerSpec(
        index=0,
        slime_home=tmp_path,
        checkpoint=tmp_path,
        host="127.0.0.1:1",
        engine_host="127.0.0.1",
        engine_port=1,
        groups=1,
        directory=tmp_path / "worker-0",
        exchange=tmp_path,
        settings=SMOKE,
        seed=0,
    )
    with RolloutProcesses([spec]) as workers:
        with pytest.raises(LearnError, match=r"rollout process 0: .*not a checkout of slime; .*continue with --resume"):
            workers.save(0)
        with pytest.raises(LearnError, match=r"rollout process 0: it ended; see .*worker-0/log"):
            workers.save(0)
    with RolloutProcesses([spec]) as workers:
        (process,) = active_children()
        process.kill()
        process.join()
        with pytest.raises(LearnError, match=r"rollout process 0: it ended; see .*worker-0/log"):
            workers.save(0)


def test_a_failed_engine_is_reported_and_not_the_episodes_that_it_left() -> None:
    from types import SimpleNamespace

    from trainer.learn import LearnError
    from trainer.learn.reinforce import Learner
    from trainer.learn.settings import SMOKE

    def fail(*_: object, **__: object) -> None:
        raise LearnError("rollout process 0: 32 groups were lost")

    def check() -> None:
        raise LearnError("engine: device lost; continue from the last checkpoint with `--resume`")

    parts: Any = SimpleNamespace(rollout=fail, evaluate=fail, check=check, model=SimpleNamespace(eval=lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.learn.reinforce.make_optimizer", lambda *_, **__: None)
        learner = Learner(parts, parts, parts, settings=SMOKE, directory=Path(), log=parts)
    for act in (learner.update, lambda: learner.evaluate(temperature=0.0)):
        with pytest.raises(LearnError, match="engine: device lost"):
            act()


@pytest.mark.parametrize("message", NO_MEMORY)
@pytest.mark.parametrize(
    ("called", "remedy"),
    [
        ("base.train", "lower base.screens, or use a larger GPU"),
        ("clone.clone", "lower clone.batch, or use a larger GPU"),
        ("reinforce.reinforce", "; use a larger GPU"),
    ],
)
def test_a_stage_without_gpu_memory_says_what_helps(
    called: str, remedy: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    from trainer.cli.learn import _Work
    from trainer.learn import LearnError
    from trainer.learn.settings import SMOKE

    def fail(*_: Any, **__: Any) -> None:
        raise out_of_memory(message)

    monkeypatch.setattr(f"trainer.learn.{called}", fail)
    monkeypatch.setattr("trainer.learn.reinforce.learner", lambda *_, **__: nullcontext())
    work = _Work(SMOKE, tmp_path, seed=0, name="rl-0", resume=False)
    stages: dict[str, Callable[[], None]] = {
        "base.train": work.base,
        "clone.clone": lambda: work.clone([], Path()),
        "reinforce.reinforce": lambda: work.reinforce([], Path()),
    }
    with pytest.raises(LearnError, match="no GPU memory is left") as raised:
        stages[called]()
    assert message in str(raised.value)
    assert remedy in str(raised.value)


def test_frames_without_gpu_memory_name_the_demonstrations(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trainer.learn import LearnError, clone
    from trainer.learn.policy import memory_errors

    def fail(*_: Any, **__: Any) -> None:
        raise out_of_memory(NO_MEMORY[0])

    monkeypatch.setattr(torch, "empty", fail)
    rows: Any = [None]
    # The stage's own remedy does not hide the better one.
    with (
        pytest.raises(LearnError, match=r"lower demos.seeds, or use a larger GPU$"),
        memory_errors("lower clone.batch"),
    ):
        clone._frames_on_device(rows, policy, SIZE_PX)


# All stages


@pytest.mark.long
def test_every_stage_runs_and_a_second_start_resumes(tmp_path: Path, fake_daemon: str) -> None:
    from trainer.learn.record import read_metrics

    run = tmp_path / "run"

    def learn(*words: str, program: Sequence[str] = ("trainer", "learn")) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            [sys.executable, "-m", *program, *words, "--smoke", "--run", str(run)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )

    played = tmp_path / "played.yaml"
    played.write_text(
        """
validation_variants: 1
held_out_variants: 0
held_out_template_variants: 0
clone: {steps: 4, check_every: 2, sampled_success: [0.5, 1.0]}
rl: {tasks: [drawn/press], validate_every: 1}
"""
    )
    refused = learn("all", "--config", str(played))
    assert (refused.returncode, "clone: sampled success is 0.00 after 4 steps" in refused.stderr) == (1, True)
    [last] = [line for line in read_metrics(run / "clone") if line["step"] == 4]
    assert (last["success_frac"], last["void_frac"]) == (0, 0)
    validated = learn("rl", "--config", str(played), "--name", "validated")
    assert validated.returncode == 0, validated.stderr[-3000:]
    played_at = [line["step"] for line in read_metrics(run / "validated") if line["stage"] == "validation"]
    assert played_at == [0, 1, 2]
    shutil.rmtree(run / "validated")
    done = learn("all", "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((run / "report" / "results.json").read_text())
    assert results["runs"]["rl-0"]["updates"] == 2
    assert results["runs"]["rl-0"]["void_frac"] == 0
    assert results["grpo"]["seeds"] == 1
    again = learn("rl")
    assert (again.returncode, "add --resume" in again.stderr) == (1, True)
    resumed = learn("rl", "--resume")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    updates = [json.loads(line)["update"] for line in (run / "rl-0" / "evaluations.jsonl").read_text().splitlines()]
    assert updates == [0, 0, 2, 2, 2, 2]
    assert json.loads((run / "rl-0" / "run.json").read_text())["status"] == "ended"
    tools = ["tests.tools.learning"]
    replay = learn("replay", "--task", "drawn/press?seed=1000000000", program=tools)
    assert replay.returncode == 0, replay.stderr[-3000:]
    assert (run / "report" / "replay-drawn-press-seed-1000000000.gif").read_bytes().startswith(b"GIF")
    started = run / "daemons" / "replay"
    shutil.rmtree(started)
    running = learn("replay", "--task", "drawn/tick?seed=1000000000", "--envd", fake_daemon, program=tools)
    assert running.returncode == 0, running.stderr[-3000:]
    assert (run / "report" / "replay-drawn-tick-seed-1000000000.gif").exists()
    assert not started.exists()
    unknown = learn("replay", "--task", "drawn/nothing", program=tools)
    assert (unknown.returncode, "task drawn/nothing: its episode is void" in unknown.stderr) == (1, True)
    other = run.parent / "other.yaml"
    other.write_text("rl: {learning_rate: 1.0}\n")
    changed = learn("rl", "--resume", "--config", str(other))
    assert (changed.returncode, "rl.learning_rate was 5e-05 and is 1.0" in changed.stderr) == (1, True)
