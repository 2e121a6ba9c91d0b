"""slime's generate function for a harness: it plays an episode through a gateway, and its rows are trained.

`--custom-generate-function-path trainer.gateway.slime.generate`, with a mapping `harness:` next to `envd:`. The daemon
scores the episode when the harness has ended.
"""

import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cuaenv.client import AsyncEpisode, EnvError
from trainer.agent.loop import AgentEpisode
from trainer.agent.types import Conversation, ModelFailed, NoReply, Outcome, Reply, Trajectory, Turn
from trainer.config import InputError, parse
from trainer.gateway.gateway import TokenGateway
from trainer.gateway.harness import HarnessFailed, HarnessSettings, run_harness
from trainer.gateway.server import serve
from trainer.gateway.session import GatewaySession
from trainer.gateway.settings import GatewaySettings
from trainer.rewards.facts import TurnFacts
from trainer.rewards.recipes import TaskScore
from trainer.slime.job import job_of
from trainer.slime.play.rollout import Rollout
from trainer.tokens.conversation import Engine
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Play a sample's task by the harness of `harness:`; returns its rows. Otherwise as `trainer.slime.hooks.generate`.

    Raises:
        InputError: The configuration is invalid; no episode was opened.
        Halted: The run cannot go well.
    """
    harness_of(args)
    job = job_of(args)
    if job.config.group == "tree" or getattr(args, "partial_rollout", False):
        raise InputError(
            "harness: the state of a harness cannot be copied; set envd.group to fork, and remove --partial-rollout"
        )
    if not job.config.agent.images_per_row:
        raise InputError(
            "envd.agent.images_per_row is 0: a harness may rewrite its history, so an episode may have several rows;"
            " set it to the most pictures of a row"
        )
    if job.config.recipe == TaskScore(strict=True):
        raise InputError(
            "envd.reward: strict: a harness ends the episode, and not by a reply, so each reward would be 0; remove it"
        )
    return await job.play_sample(args, sample, sampling_params, evaluation=evaluation, rollout_type=HarnessRollout)


def harness_of(args: Any) -> HarnessSettings:
    """Return the harness in slime's args. Raises: InputError."""
    mapping = getattr(args, "harness", None)
    if not isinstance(mapping, Mapping):
        raise InputError("--custom-config-path: no mapping `harness:`; add one with `command: [PROGRAM, ...]`")
    return parse(HarnessSettings, mapping, path="harness")


class HarnessRollout(Rollout):
    """The rollout of one sample by a harness."""

    _session: GatewaySession | None = None

    @property
    def rows(self) -> list[Row]:
        """Rows of the last attempt."""
        return [recorded.row for recorded in self._session.rows] if self._session else []

    async def play_episode(self, episode: AgentEpisode, conversation: Conversation) -> Trajectory:  # noqa: ARG002 -- the gateway has its own
        """Play an open episode by the harness, and have it scored."""
        opened = self.episode
        if opened is None:
            raise RuntimeError("the episode is not open")
        # The harness opens no other session: its replies would not be in the sample.
        gateway = TokenGateway(self._chat, None, settings=self._limits)
        session = self._session = gateway.create(opened.episode_id, self._engine_of)
        timings_s = {"model": 0.0, "step": 0.0, "evaluate": 0.0}
        outcome, reason, error, evaluation = Outcome.TERMINATED, "done", None, None
        try:
            with _timed(timings_s, "step"):
                await self._run_harness(gateway, session, opened)
            timings_s["model"] = session.counts.model_s
            timings_s["step"] -= session.counts.model_s
            if session.exhausted:
                outcome, reason = Outcome.TRUNCATED, session.exhausted
            with _timed(timings_s, "evaluate"), self._traced("env_evaluate", {}) as add:
                evaluation = await episode.evaluate(timeout=self.config.agent.evaluate_timeout)
                add({"score": evaluation.score})
        except (EnvError, ModelFailed, HarnessFailed) as raised:
            logger.warning("episode %s of %s is void: %s", episode.episode_id, episode.task_id, raised)
            outcome, reason, error = Outcome.FAILED, type(raised).__name__, raised
        return Trajectory(
            task_id=episode.task_id,
            instruction=episode.instruction,
            outcome=outcome,
            reason=reason,
            error=error,
            turns=tuple(turns_of(session)),
            evaluation=evaluation,
            guest_end_cause=evaluation.guest_end_cause if evaluation else "",
            origin=episode.origin,
            episode_id=episode.episode_id,
            timings_s=timings_s,
        )

    async def _run_harness(self, gateway: TokenGateway, session: GatewaySession, episode: AsyncEpisode) -> None:
        """Run the harness to its end. Raises: HarnessFailed, ModelFailed."""
        key = secrets.token_urlsafe(24)
        async with serve(gateway, key=key) as url:
            try:
                await run_harness(harness_of(self.args), _environment(url, key, session, episode))
            except HarnessFailed:
                # The harness did not fail by itself: a limit of ours stopped it.
                if not session.exhausted and not session.void:
                    raise
        if session.void:
            raise ModelFailed(session.void)
        if not session.rows:
            raise NoReply("the harness ended without a reply of the model", budget=session.exhausted or "turns")

    @property
    def _limits(self) -> GatewaySettings:
        agent = self.config.agent
        return GatewaySettings(
            context_tokens=agent.context_tokens,
            reply_tokens=min(agent.reply_tokens, int(self._sampling_params["max_new_tokens"])),
            max_turns=agent.max_turns,
            max_pictures=agent.images_per_row,
        )

    def _engine_of(self, _: str, stop: Sequence[str]) -> Engine:
        params = {**self._sampling_params, **({"stop": list(stop), "no_stop_trim": True} if stop else {})}
        return self.new_engine(params)


def turns_of(session: GatewaySession) -> list[Turn]:
    """Return the replies of a session as turns, whose actions only the harness knows."""
    return [
        Turn(
            reply=Reply(text=piece.text, token_ids=piece.train_ids, log_probs=piece.log_probs),
            actions=(),
            facts=TurnFacts(text=piece.text, parsed=parsed, token_count=len(piece.train_ids)),
            row=number,
        )
        for number, recorded in enumerate(session.rows)
        for piece, parsed in zip(
            (piece for piece in recorded.row.pieces if piece.sampled), recorded.parsed, strict=True
        )
    ]


def _environment(url: str, key: str, session: GatewaySession, episode: AsyncEpisode) -> dict[str, str]:
    """Return the variables by which a harness finds the model and its episode."""
    base = f"{url}/sessions/{session.session_id}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "ENVD_TARGET": episode.host.target,
        "ENVD_EPISODE": episode.episode_id,
        "ENVD_TASK": episode.task_id,
        "ENVD_INSTRUCTION": episode.instruction,
        "NO_PROXY": ",".join(filter(None, ["127.0.0.1", os.environ.get("NO_PROXY", "")])),
    }


@contextmanager
def _timed(timings_s: dict[str, float], phase: str) -> Iterator[None]:
    started_s = time.monotonic()
    try:
        yield
    finally:
        timings_s[phase] += time.monotonic() - started_s
