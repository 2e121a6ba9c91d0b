"""A small slime job on one CPU: slime's real rollout code with arguments as its parser returns them.

Modules that are not installed are replaced by `tests.support.stand_ins`. Needs a checkout of slime.
"""

import math
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support import stand_ins
from tests.support.slime import SMALL_JOB
from trainer.learn import slime_job
from trainer.slime.play.samples import flatten, is_void

if TYPE_CHECKING:
    from tests.support.sglang import SglangServer


def use_slime(home: Path) -> None:
    """Make `import slime` find a checkout, and its GPU dependencies find stand-ins."""
    stand_ins.install()
    slime_job.use_slime(home)


class SlimeJob(slime_job.SlimeRollouts):
    """slime's data source, rollout functions and conversion to train data.

    Use as a context manager: slime itself never closes its connections.
    """

    def __init__(self, args: Namespace) -> None:
        """Reset slime's state and connections, which are global in the process."""
        import_module("slime.utils.misc").SingletonMeta._instances.clear()
        super().__init__(args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close slime's connections in the loop that opened them."""
        import_module("slime.utils.async_utils").run(self._http._http_client.aclose())

    @property
    def image_id(self) -> int:
        """Id of the image placeholder."""
        state: Any = import_module("slime.rollout.sglang_rollout").GenerateState(self.args)
        return int(state.tokenizer.convert_tokens_to_ids("<|image_pad|>"))

    def fully_async_rollout(self, rollout_id: int = 0) -> Any:
        """Run one rollout of the fully asynchronous loop, in its own thread. Returns the groups."""
        self.args.rollout_function_path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
        module: Any = import_module("slime.rollout.fully_async_rollout")
        if not hasattr(module.AsyncRolloutWorker._loop, "__wrapped__"):
            module.AsyncRolloutWorker._loop = _closing_its_connections(module.AsyncRolloutWorker._loop, self._http)
        return module.generate_rollout_fully_async(self.args, rollout_id, self.data_source)

    def stop_fully_async(self) -> None:
        """Stop that loop after its episodes have ended."""
        module: Any = import_module("slime.rollout.fully_async_rollout")
        worker = module._global_worker
        module._stop_global_worker()
        if worker is not None:
            # slime waits 5 s for the thread, which waits 30 s for the episodes in flight.
            worker.worker_thread.join(timeout=60)
            assert not worker.worker_thread.is_alive(), "episodes of the fully asynchronous loop hang"


def _closing_its_connections(run_loop: Callable[[Any], Awaitable[None]], http: Any) -> Callable[[Any], Awaitable[None]]:
    """Return slime's worker loop, changed to close slime's client at its end.

    The worker's connections belong to its event loop, so they cannot be closed after it.
    """

    @wraps(run_loop)
    async def run_and_close(worker: Any) -> None:
        try:
            await run_loop(worker)
        finally:
            await http._http_client.aclose()

    return run_and_close


def check_sample(sample: Any, *, image_id: int, may_be_masked: bool = False) -> None:
    """Assert the invariants that slime's training relies on.

    Args:
        sample: One of slime's.
        image_id: Id of the image placeholder.
        may_be_masked: Whether slime masks samples that were complete in an earlier rollout. It keeps their
            log-probabilities.
    """
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length >= 1
    assert len(sample.tokens) - sample.response_length >= 1
    assert sample.reward is not None
    if may_be_masked and not is_void(sample) and not any(sample.loss_mask):
        return
    for mask, log_prob in zip(sample.loss_mask, sample.rollout_log_probs, strict=True):
        assert mask in (0, 1)
        assert mask or log_prob == 0
    if is_void(sample):
        assert not any(sample.loss_mask)
        assert sample.multimodal_train_inputs is None
        return
    assert sample.loss_mask[-1] == 1, "a row ends with a reply"
    inputs = sample.multimodal_train_inputs
    patch_count = int(inputs["image_grid_thw"].prod(dim=1).sum())
    assert set(inputs) == {"pixel_values", "image_grid_thw"}
    assert str(inputs["pixel_values"].dtype) == "torch.bfloat16"
    assert len(inputs["pixel_values"]) == patch_count
    assert sample.tokens.count(image_id) == patch_count // 4


def check_train_data(job: SlimeJob, groups: Sequence[Any]) -> dict[str, Any]:
    """Check each sample and column of groups; return slime's train data."""
    samples = flatten(groups)
    for sample in samples:
        masks = getattr(job.args, "mask_offpolicy_in_partial_rollout", False)
        check_sample(sample, image_id=job.image_id, may_be_masked=masks)
    data = job.train_data(groups)
    assert {len(column) for column in data.values()} == {len(samples)}
    assert all(math.isfinite(reward) for reward in data["rewards"])
    return data


def log_prob_gaps(sample: Any, model: "SglangServer") -> list[float]:
    """Return how far the trained log-probabilities of a sample are from the model's."""
    prompt_length = len(sample.tokens) - sample.response_length
    prompt, response = sample.tokens[:prompt_length], sample.tokens[prompt_length:]
    recomputed = model.log_probs(prompt, response, sample.multimodal_train_inputs)
    return [
        abs(mine - reported)
        for mine, reported, mask in zip(recomputed, sample.rollout_log_probs, sample.loss_mask, strict=True)
        if mask
    ]


def slime_args(envd: Mapping[str, Any], **changed: Any) -> Namespace:
    """Return slime's arguments of a small job. Raises: TypeError: `changed` has an unknown name."""
    args = slime_job.slime_args(envd, **SMALL_JOB)
    if unknown := sorted(name for name in changed if not hasattr(args, name)):
        raise TypeError(f"slime_args has no {', '.join(unknown)}")
    vars(args).update(changed)
    return args


def counting_job(
    envd: Mapping[str, Any], checkpoint: Path, directory: Path, *, engine: tuple[str, int], **changed: Any
) -> SlimeJob:
    """Return a small job of `fake/count-to-five` with the model that `engine`, a host and port, serves."""
    given = {
        "hf_checkpoint": str(checkpoint),
        "prompt_data": str(slime_job.write_tasks(directory / "tasks.jsonl", ["fake/count-to-five"] * 4)),
        "sglang_router_ip": engine[0],
        "sglang_router_port": engine[1],
    }
    return SlimeJob(slime_args(envd, **{**given, **changed}))
