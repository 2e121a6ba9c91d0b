"""slime's engine: requests that fail, or that a weight update aborts, are repeated and traced."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.agent.types import ModelFailed, Reply, data_uri
from trainer.slime import slime_compat
from trainer.slime.config import SlimeConfig
from trainer.slime.slime_compat import Sample
from trainer.tokens.engine_client import EngineClient
from trainer.tokens.picture_files import PictureFiles
from trainer.tokens.rows import Row
from trainer.tokens.sglang import EngineDown, SglangEngine

if TYPE_CHECKING:
    from PIL import Image


class SlimeEngine:
    """The engines behind slime's router. See `trainer.tokens.conversation.Engine`."""

    def __init__(
        self,
        args: Any,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        config: SlimeConfig,
        client: EngineClient,
        files: PictureFiles | None = None,
    ) -> None:
        """Prepare.

        Args:
            args: slime's.
            sample: The sample, for traces and the router.
            sampling_params: SGLang's.
            config: Its times and attempts.
            client: Sends requests, unless slime's own client has to.
            files: Where pictures are written; None to send them in requests.
        """
        self.url = engine_url(args)
        """Address of the router."""
        self._sample = sample
        self._state = slime_compat.generate_state(args)
        self._client = client
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
            name=f"engine {self.url}, sample {sample.index}",
            attempts=config.engine_retries,
            timeout_s=config.engine_timeout_s,
            is_aborted=lambda: self._state.aborted,
        )

    def encode(self, images: "Sequence[Image.Image]") -> None:
        """See `trainer.tokens.conversation.Engine`."""
        self._sglang.encode(images)

    async def sample(self, row: Row, *, limit: int) -> Reply:
        """See `trainer.tokens.conversation.Engine`. Raises: BudgetExhausted, ModelFailed."""
        try:
            with slime_compat.span(self._sample, "sglang_generate", {"max_new_tokens": limit}) as add:
                sampled = await self._sglang.sample(row, limit=limit)
                add(slime_compat.engine_attributes(sampled.extra or {}))
        except EngineDown as error:
            raise ModelFailed(str(error)) from error
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
        answer: Mapping[str, Any]
        theirs = slime_compat.other_client()
        if theirs is None:
            answer = await self._client.post(self.url, request, headers=self._headers)
            return answer
        if "image_data" in request:
            request = {**request, "image_data": [image.decode("ascii") for image in request["image_data"]]}
        answer = await theirs(self.url, request, max_retries=1, headers=self._headers)
        return answer


def engine_url(args: Any) -> str:
    """Return the address of slime's router."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
