"""Check that slime's engine and learner see the pixels of every turn; see `trainer.sight.check`.

`envd.sight` makes `generate` check the engine and the rows before the first episode of a process, by the job's own
rollout, samples and engine. `trainer sight` examines engine and learner with a model on this machine.
"""

import asyncio
import copy
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trainer.agent.loop import run_episode
from trainer.agent.starts import task_id_of
from trainer.agent.types import Trajectory
from trainer.sight.check import Episode, Patches, Report, compare, given_pictures, turns_of_row
from trainer.sight.episode import PictureEpisode, plan_of, settings_of, tokens_of
from trainer.slime.config import SlimeConfig
from trainer.slime.generate import run_rollout
from trainer.slime.rollout import Rollout
from trainer.slime.rows import start_of_row
from trainer.slime.samples import facts_of, flatten, is_void, reset_sample
from trainer.slime.slime_compat import Sample, generate_state

logger = logging.getLogger(__name__)


class SightError(Exception):
    """The check found a fault, or an episode of it failed."""


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:  # noqa: ARG001 -- slime passes it
    """Play the episode of a plan that a sample's task `sight/NUMBER` names, for `--custom-generate-function-path`."""
    config = SlimeConfig.from_args(args)
    start = start_of_row(sample.metadata, sample.label, config.task_key)
    number = int(task_id_of(start).rpartition("/")[2])
    return await _play(args, sample, sampling_params, config, number)


async def _play(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], config: SlimeConfig, number: int
) -> list[Sample]:
    reset_sample(sample)
    greedy = {**sampling_params, "temperature": 0.0}
    rollout = _PictureRollout(args, sample, greedy, config=config, number=number)
    rows = flatten([await run_rollout(args, rollout, "sight", 1, 1, evaluation=False)])
    for row in rows:
        if is_void(row):
            raise SightError(f"the check's episode {number} failed: {facts_of(row)}")
    return rows


class _PictureRollout(Rollout):
    """A rollout that plays pictures of the plan, not a desktop."""

    def __init__(self, args: Any, sample: Sample, params: Any, *, config: SlimeConfig, number: int) -> None:
        self._pictures = plan_of(config.agent).episodes[number]
        own = {"agent": settings_of(config.agent), "replay": None}
        super().__init__(args, sample, params, config=config.model_copy(update=own))

    async def run(self, start: object, *, group_size: int) -> Trajectory:  # noqa: ARG002 -- it has one task
        return await run_episode(PictureEpisode(self._pictures), self.new_conversation(), settings=self.config.agent)


async def require_sight(args: Any, sample: Sample, sampling_params: Mapping[str, Any], config: SlimeConfig) -> str:
    """Check engine and rows once in this process, by `envd.sight`; return why the job must not run, or nothing.

    A fault is a warning with `warn`. Other samples wait until the check is done.
    """
    if config.sight == "off" or config.agent.text_only:
        return ""
    key = (args.sglang_router_ip, args.sglang_router_port, config.model_dump_json())
    if key not in _checks:
        found = _checks[key] = Future[str]()
        try:
            report = await _examined(args, sample, sampling_params, config)
            logger.info("[envd] sight, of engine and rows without a learner:\n%s", report)
            found.set_result("\n".join(map(str, report.findings)))
        except Exception as error:
            found.set_result(f"it could not be made: {type(error).__name__}: {error}")
        except BaseException:
            # Cancelled: the next sample repeats it.
            del _checks[key]
            found.set_result("")
            raise
        if found.result():
            logger.warning("[envd] sight: %s", found.result())
    problem = await asyncio.wrap_future(_checks[key])
    return f"the policy does not see its pixels: {problem}" if problem and config.sight == "refuse" else ""


_checks: dict[tuple[Any, ...], "Future[str]"] = {}


async def _examined(args: Any, sample: Sample, sampling_params: Mapping[str, Any], config: SlimeConfig) -> Report:
    plan, state = plan_of(config.agent), generate_state(args)

    async def played(number: int) -> Episode:
        mine = copy.copy(sample)
        mine.metadata = {}
        return [
            turn
            for row in await _play(args, mine, sampling_params, config, number)
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
