"""Check that slime's engine and learner see the pixels of every turn; see `trainer.sight.check`.

`envd.sight` makes a job check the engine and the rows before its first episode, by the job's own
rollout, samples and engine. `trainer sight` examines engine and learner with a model on this machine.
"""

import asyncio
import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.agent.loop import play_episode
from trainer.agent.types import ModelFailed
from trainer.sight.check import Episode, Patches, Report, compare, given_pictures, turns_of_row
from trainer.sight.episode import PictureEpisode, plan_of, settings_of, tokens_of
from trainer.slime.play.rollout import Resources, Rollout
from trainer.slime.play.samples import facts_of, flatten, is_void, reset_sample
from trainer.slime.slime_compat import Sample, generate_state

logger = logging.getLogger(__name__)


async def play_pictures(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], number: int, *, here: Resources
) -> list[Sample]:
    """Play an episode of the plan; return its rows. Raises: ModelFailed: It failed."""
    reset_sample(sample)
    own = {"agent": settings_of(here.config.agent), "replay": None, "pad_rows_to": 1}
    shared = replace(here, config=here.config.model_copy(update=own), pool=None)
    rollout = Rollout(args, sample, {**sampling_params, "temperature": 0.0}, here=shared)
    episode, settings = PictureEpisode(plan_of(here.config.agent).episodes[number]), shared.config.agent
    try:
        trajectory = await play_episode(episode, rollout.new_conversation(), settings=settings)
    finally:
        await rollout.close()
    rows = flatten([await rollout.result_of(trajectory)])
    for row in rows:
        if is_void(row):
            raise ModelFailed(f"the check's episode {number} failed: {facts_of(row)}")
    return rows


async def sight_problem(args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, here: Resources) -> str:
    """Check engine and rows, by the job's own rollout, samples and engine; return the fault, or nothing."""
    try:
        report = await _examined(args, sample, sampling_params, here)
    except Exception as error:
        problem = f"it could not be made: {type(error).__name__}: {error}"
    else:
        logger.info("[envd] sight, of engine and rows without a learner:\n%s", report)
        problem = "\n".join(map(str, report.findings))
    if problem:
        logger.warning("[envd] sight: %s", problem)
    return problem


async def _examined(args: Any, sample: Sample, sampling_params: Mapping[str, Any], here: Resources) -> Report:
    config, state = here.config, generate_state(args)
    plan = plan_of(config.agent)

    async def played(number: int) -> Episode:
        mine = copy.copy(sample)
        mine.metadata = {}
        return [
            turn
            for row in await play_pictures(args, mine, sampling_params, number, here=here)
            for turn in turns_of_row(
                row.tokens,
                row.loss_mask or (),
                row.rollout_log_probs or (),
                row.multimodal_train_inputs,
                **tokens_of(state.processor),
            )
        ]

    episodes = await asyncio.gather(*map(played, range(len(plan.episodes))))
    patches = Patches.of(state.processor.image_processor)
    if config.record_dir:
        Path(config.record_dir).mkdir(parents=True, exist_ok=True)
        picture = await asyncio.to_thread(given_pictures, plan, episodes, patches)
        picture.save(Path(config.record_dir) / "sight.png")
    return await asyncio.to_thread(compare, plan, episodes, None, patches)
