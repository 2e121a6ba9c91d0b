"""Check through a gateway that a model sees the pictures of a harness; see `trainer.sight.check`.

The harness is our agent's loop behind OpenAI's client: it sends all messages with their pictures in every request.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from trainer.agent.loop import play_episode
from trainer.agent.settings import AgentSettings
from trainer.agent.types import ModelFailed
from trainer.evaluate.chat import ChatConversation, Sampling
from trainer.evaluate.endpoint import open_endpoint
from trainer.gateway.engine import gateway_engine
from trainer.gateway.gateway import TokenGateway
from trainer.gateway.record import token_row
from trainer.gateway.server import serve
from trainer.gateway.settings import GatewaySettings
from trainer.learn.sight import ModelServer, tiny_model
from trainer.sight.check import Episode, Patches, Report, SampledReply, compare, given_pictures, turns_of_row
from trainer.sight.episode import PictureEpisode, plan_of, settings_of, tokens_of
from trainer.sight.model import SightModel
from trainer.tokens.chat import Chat
from trainer.tokens.engine_client import EngineClient


def examine(
    *,
    agent: AgentSettings,
    checkpoint: Path | None = None,
    engine: tuple[str, int] | None = None,
    picture: Path | None = None,
) -> Report:
    """Return the report of `trainer sight --gateway`; arguments are those of `trainer.learn.sight.examine`.

    Raises:
        ModelFailed: An episode failed.
    """
    plan = plan_of(agent)
    with tempfile.TemporaryDirectory() as directory:
        model = SightModel(checkpoint or tiny_model(Path(directory) / "model", agent))
        with ModelServer(model) as server:
            host, port = engine or (server.host, server.ports[0])
            episodes = asyncio.run(played(agent, model, f"http://{host}:{port}"))
    patches = Patches.of(model.processor.image_processor)
    if picture is not None:
        given_pictures(plan, episodes, patches).save(picture)
    return compare(plan, episodes, model.log_probs, patches)


async def played(agent: AgentSettings, model: SightModel, engine: str) -> list[Episode]:
    """Play the episodes of the plan; return them as their rows have them. Raises: ModelFailed: One failed."""
    chat = Chat(model.tokenizer, model.processor)
    limits = GatewaySettings(
        context_tokens=agent.context_tokens,
        reply_tokens=settings_of(agent).reply_tokens,
        max_pictures=agent.token_budget.images,
        sampling={"temperature": 0.0},
    )
    client = EngineClient()
    try:
        gateway = TokenGateway(chat, partial(gateway_engine, engine, client, limits), settings=limits)
        async with serve(gateway) as url:
            return [
                await _played(agent, model, gateway, url, number=number, pictures=pictures)
                for number, pictures in enumerate(plan_of(agent).episodes)
            ]
    finally:
        client.close()


async def _played(
    agent: AgentSettings,
    model: SightModel,
    gateway: TokenGateway,
    url: str,
    *,
    number: int,
    pictures: Sequence[Image.Image],
) -> Episode:
    name, settings = f"sight-{number}", settings_of(agent)
    sampling = Sampling(max_reply_tokens=settings.reply_tokens)
    async with open_endpoint(f"{url}/sessions/{name}/v1", max_retries=0) as endpoint:
        conversation = ChatConversation(endpoint, model="policy", sampling=sampling)
        trajectory = await play_episode(PictureEpisode(pictures), conversation, settings=settings)
    if trajectory.error is not None:
        raise ModelFailed(f"the check's episode {number} failed: {trajectory.error}") from trajectory.error
    chat, turns = Chat(model.tokenizer, model.processor), list[SampledReply]()
    for recorded in gateway.find(name).rows:
        row = token_row(recorded.row)
        inputs = await asyncio.to_thread(chat.tensors, recorded.row.trained_images, row.tokens)
        turns += turns_of_row(row.tokens, row.loss_mask, row.log_probs, inputs, **tokens_of(model.processor))
    return turns
