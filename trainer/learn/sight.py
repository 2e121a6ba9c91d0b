"""`trainer sight`: slime's rollout code with our plug-in, and a model on this machine as engine and learner."""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.agent.grammars import Picture
from trainer.agent.settings import AgentSettings
from trainer.learn.checkpoint import write_checkpoint
from trainer.learn.server import GenerateServer, answer_of, picture_of
from trainer.learn.slime_job import SlimeRollouts, slime_args, use_slime, write_tasks
from trainer.sight.check import Episode, Patches, Report, SampledReply, compare, given_pictures, turns_of_row
from trainer.sight.episode import plan_of
from trainer.sight.model import SightModel


def examine(
    slime_home: Path,
    *,
    agent: AgentSettings,
    checkpoint: Path | None = None,
    engine: tuple[str, int] | None = None,
    picture: Path | None = None,
) -> Report:
    """Return the report of `trainer sight`.

    Args:
        slime_home: Checkout of slime.
        agent: Prompt, grammar and pictures of the job.
        checkpoint: The model; by default a small Qwen3-VL with random weights.
        engine: Host and port of an engine or router that serves the model; by default this process does.
        picture: Where to write a picture of what the learner is given.

    Raises:
        LearnError: There is no checkout.
        ModelFailed: An episode failed.
    """
    use_slime(slime_home)
    plan = plan_of(agent)
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoint or tiny_model(Path(directory) / "model", agent)
        model = SightModel(path)
        patches = Patches.of(model.processor.image_processor)
        with ModelServer(model) as server:
            address = engine or (server.host, server.ports[0])
            job = SlimeRollouts(job_args({}, agent, path, Path(directory), engine=address))
            episodes = rolled_out(job, model)
    if picture is not None:
        given_pictures(plan, episodes, patches).save(picture)
    return compare(plan, episodes, model.log_probs, patches)


def tiny_model(directory: Path, agent: AgentSettings) -> Path:
    """Write a small Qwen3-VL with random weights, whose tokenizer knows the agent's prompt."""
    return write_checkpoint(directory, vocabulary=[agent.make_grammar().instructions(Picture(1001, 1001))] * 8)


def job_args(
    envd: Mapping[str, Any], agent: AgentSettings, checkpoint: Path, directory: Path, *, engine: tuple[str, int]
) -> Any:
    """Return slime's arguments of a rollout with all episodes of the check, which asks no daemon."""
    count = len(plan_of(agent).episodes)
    return slime_args(
        {"hosts": ["127.0.0.1:1"], **envd, "agent": asdict(agent)},
        hf_checkpoint=str(checkpoint),
        prompt_data=str(write_tasks(directory / "tasks.jsonl", [f"sight/{number}" for number in range(count)])),
        rollout_shuffle=False,
        n_samples_per_prompt=1,
        rollout_batch_size=count,
        over_sampling_batch_size=count,
        global_batch_size=count,
        rollout_max_response_len=512,
        custom_generate_function_path="trainer.slime.hooks.play_sight",
        sglang_router_ip=engine[0],
        sglang_router_port=engine[1],
    )


def rolled_out(job: SlimeRollouts, model: SightModel) -> list[Episode]:
    """Return the episodes, as slime's rollout manager hands them to its learners."""
    data = job.train_data(job.rollout().samples)
    names = ("sample_indices", "tokens", "loss_masks", "rollout_log_probs")
    images = data.get("multimodal_train_inputs") or [None] * len(data["tokens"])
    episodes: dict[int, list[SampledReply]] = defaultdict(list)
    rows = zip(*(data[name] for name in names), images, strict=True)
    for index, tokens, mask, log_probs, inputs in rows:
        episodes[index] += turns_of_row(
            tokens, mask, log_probs, inputs, image_id=model.image_id, decode=model.tokenizer.decode
        )
    return [episodes[index] for index in sorted(episodes)]


class ModelServer(GenerateServer):
    """Serves greedy replies of a model."""

    def __init__(self, model: SightModel) -> None:
        super().__init__()
        self._model = model
        self._turn = asyncio.Lock()

    def reply(self, ids: Sequence[int], images: Sequence[Any], *, limit: int) -> tuple[list[int], list[float]]:
        return self._model.reply(ids, images, limit=limit)

    async def generate(self, payload: Mapping[str, Any], *, is_aborted: Callable[[], bool]) -> dict[str, Any]:  # noqa: ARG002 -- nothing is aborted
        uris, ids = payload.get("image_data") or [], payload["input_ids"]
        images = [picture_of(uri).convert("RGB") for uri in uris]
        limit = int(payload["sampling_params"]["max_new_tokens"])
        async with self._turn:
            reply, log_probs = await asyncio.to_thread(self.reply, ids, images, limit=limit)
        is_complete = reply[-1] == self._model.tokenizer.eos_token_id
        inputs = self._model.processor.image_processor(images=images, return_tensors="pt") if images else {}
        return answer_of(
            self._model.tokenizer.decode(reply),
            reply,
            log_probs,
            finish="stop" if is_complete else "length",
            prompt_tokens=len(self._model.expanded(ids, inputs)),
            weight_version="1",
        )
