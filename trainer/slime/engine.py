"""slime's engine in one sample: requests that fail, or that a weight update aborts, are repeated and traced."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.agent.types import BudgetExhausted, ModelFailed, data_uri
from trainer.slime import slime_compat
from trainer.slime.config import SlimeConfig
from trainer.slime.pictures import PictureFiles
from trainer.slime.slime_compat import Sample
from trainer.tokens.conversation import Sampled
from trainer.tokens.rows import Row
from trainer.tokens.sglang import SglangEngine, is_context_full

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)
_PAUSE_S = 1.0
_SERVER_ERROR_ATTEMPTS = 3
_TRANSIENT = {408, 409, 425, 429}
_QUOTED_CHARS = 300


class SlimeEngine:
    """The engines behind slime's router. See `trainer.tokens.conversation.Engine`."""

    def __init__(
        self,
        args: Any,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        config: SlimeConfig,
        is_aborted: Callable[[], bool],
        files: PictureFiles | None = None,
    ) -> None:
        """Prepare.

        Args:
            args: slime's.
            sample: The sample, for traces and the router.
            sampling_params: SGLang's.
            config: Its times and attempts.
            is_aborted: Whether slime needs no more samples.
            files: Where pictures are written; None to send them in requests.
        """
        self.url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        """Address of the router."""
        self._sample = sample
        self._config = config
        self._is_aborted = is_aborted
        self._files = files
        self._written: list[bytes] = []
        has_affinity = sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing"
        self._headers = {"X-SMG-Routing-Key": str(sample.session_id)} if has_affinity else None
        routed = getattr(args, "use_rollout_routing_replay", False)
        self._sglang = SglangEngine(
            self._post,
            sampling_params=sampling_params,
            encode_image=self._encoded,
            extras={"return_routed_experts": True} if routed else {},
        )

    def encode(self, images: "Sequence[Image.Image]") -> None:
        """See `trainer.tokens.conversation.Engine`."""
        self._sglang.encode(images)

    async def sample(self, row: Row, *, limit: int) -> Sampled:
        """See `trainer.tokens.conversation.Engine`. Raises: BudgetExhausted, ModelFailed."""
        try:
            with slime_compat.span(self._sample, "sglang_generate", {"max_new_tokens": limit}) as traced:
                async with asyncio.timeout(self._config.engine_timeout_s):
                    sampled = await self._repeated(row, limit)
                traced.update(slime_compat.engine_attributes(sampled.extra))
        except (BudgetExhausted, ModelFailed):
            raise
        except Exception as error:
            raise ModelFailed(f"engine {self.url}: no response: {type(error).__name__}: {error}") from error
        return sampled

    def close(self) -> None:
        """Remove the files of its pictures."""
        if self._files is not None:
            self._files.remove(self._written)

    def _encoded(self, image: "Image.Image") -> bytes:
        # As bytes, the engine's client sends it as it is.
        if self._files is None:
            return data_uri(image).encode("ascii")
        self._written.append(self._files.add(image))
        return self._written[-1]

    async def _post(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = await slime_compat.post(self.url, request, max_retries=1, headers=self._headers)
        return answer

    async def _repeated(self, row: Row, limit: int) -> Sampled:
        """Repeat a request that fails or that the engine aborts, as it does at a weight update.

        Raises:
            BudgetExhausted: The prompt does not fit into the model's context.
            ModelFailed: The engine refuses the request, or `envd.engine_retries` attempts failed.
        """
        name, retries = self._sample.index, self._config.engine_retries
        for attempt in range(1, retries + 1):
            try:
                sampled = await self._sglang.sample(row, limit=limit)
            except ModelFailed:
                raise
            except Exception as error:
                _check_worth_retrying(error, attempt)
                if attempt == retries:
                    raise
                logger.info("[envd] sample %s: attempt %d of a reply failed: %s", name, attempt, error)
            else:
                if sampled.finish != "abort" or self._is_aborted():
                    return sampled
                logger.info("[envd] sample %s: the engine aborted attempt %d of a reply", name, attempt)
            await asyncio.sleep(_PAUSE_S)
        raise ModelFailed(f"the engine aborted the request {retries} times (envd.engine_retries)")


def _check_worth_retrying(error: Exception, attempt: int) -> None:
    """Raise if repeating a request cannot help. Raises: BudgetExhausted, ModelFailed."""
    response = getattr(error, "response", None)
    status, text = getattr(response, "status_code", 0), str(getattr(response, "text", ""))
    if is_context_full(status, text):
        raise BudgetExhausted(f"the engine's context is full: {text[:_QUOTED_CHARS]}", budget="total") from error
    is_refused = 400 <= status < 500 and status not in _TRANSIENT
    # SGLang answers so to a request that it cannot process, such as a broken image. Its router answers 500 with another
    # text while an engine restarts.
    is_failing = status == 500 and text.strip() == "Internal Server Error"
    if is_refused or (is_failing and attempt >= _SERVER_ERROR_ATTEMPTS):
        raise ModelFailed(f"the engine refused the request, status {status}: {text[:_QUOTED_CHARS]}") from error
