"""Does verifiers' trainer see the pixels of every turn? May be copied; see docs/train-watch.md."""

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from PIL import Image

from trainer.adapters.verifiers import DesktopEnv, DesktopEnvConfig
from trainer.agent.loop import AgentEpisode
from trainer.sight.check import SampledReply, turns_of_row
from trainer.sight.episode import PictureEnvironments, plan_of, settings_of, tokens_of
from trainer.tokens.patches import image_tensors


class SightEnv(DesktopEnv):
    """Checks that engine and traces have the pixels of every turn; see `trainer.sight.check`.

    The taskset names a task `sight/N` for each of `plan.episodes`, which play their pictures without a daemon.
    verifiers' client for training records the tokens; sample with temperature 0. `turns_of` returns the turns of each
    trace.
    """

    def __init__(self, config: DesktopEnvConfig) -> None:
        """Check the settings, as `DesktopEnv` does. Raises: InputError."""
        super().__init__(config)
        self.plan = plan_of(self._agent)
        """The pictures."""
        self._agent = settings_of(self._agent)

    @asynccontextmanager
    async def _opened(self, task_id: str) -> AsyncIterator[AgentEpisode]:
        yield await PictureEnvironments(self.plan).reset(task_id)


def turns_of(trace: Any, processor: Any) -> list[SampledReply]:
    """Return the turns of a trace, with tensors of the pictures in its messages, as a learner makes them."""
    (branch,) = trace.branches
    contents = [message.content for message in branch.messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content or ()]
    urls = [part.image_url.url for part in parts if part.type == "image_url"]
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in urls]
    inputs = image_tensors(processor.image_processor, images) if images else None
    mask = [int(each) for each in branch.sampled_mask]
    return turns_of_row(branch.token_ids, mask, branch.logprobs, inputs, **tokens_of(processor))
