"""`DesktopWorkflow`, which AReaL loads by its path."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from areal import workflow_context
from areal.api import ModelRequest
from areal.api.workflow_api import RolloutWorkflow
from areal.infra.utils.concurrent import register_loop_cleanup, unregister_loop_cleanup
from areal.utils import stats_tracker
from areal.utils.hf_utils import load_hf_processor_and_tokenizer, load_hf_tokenizer

from cuaenv.client import close_shared_clients, shared_client
from trainer.adapters.areal.group import ArealConfig, play_group
from trainer.adapters.areal.rows import batch
from trainer.agent.attempts import Environments
from trainer.config import InputError
from trainer.tokens.chat import Chat


class DesktopWorkflow(RolloutWorkflow):  # type: ignore[misc] # AReaL is not installed for type checks
    """Runs a group of episodes per data set row; returns a row of tensors per turn."""

    def __init__(self, *, gconfig: Any, tokenizer: Any, processor: Any = None, envd: Mapping[str, Any]) -> None:
        """Check the configuration.

        Args:
            gconfig: `areal.api.cli_args.GenerationHyperparameters`; its `n_samples` must be 1, and its lengths are
                replaced by the agent's budgets.
            tokenizer: A transformers tokenizer, or the path of one.
            processor: A transformers processor of the Qwen-VL kind, or the path of one; None without images.
            envd: See `ArealConfig`.

        Raises:
            InputError: A key is unknown, a value is invalid, `n_samples` is not 1, or images have no processor.
        """
        self._config = ArealConfig.from_mapping(envd)
        if gconfig.n_samples != 1:
            raise InputError(
                f"gconfig.n_samples is {gconfig.n_samples}: AReaL would start each sample in its own state; set it to 1"
                f" and set envd.group_size, which is {self._config.group_size}"
            )
        self._gconfig = gconfig
        self._tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        is_path = isinstance(processor, str)
        self._processor = load_hf_processor_and_tokenizer(processor)[0] if is_path else processor
        if self._processor is None and not self._config.agent.text_only:
            # AReaL only warns if a processor cannot be loaded, and then every episode would be void.
            raise InputError(
                f"processor {processor}: transformers cannot load it; name a model that reads images, or set"
                " envd.agent.text_only"
            )
        self._chat = Chat(self._tokenizer, self._processor)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run a data set row's task as a group. Returns its rows, or None if all episodes are void.

        Raises:
            InputError: The row has no task id.
        """

        async def call(input_ids: list[int], images: list[str], limit: int) -> Any:
            return await engine.agenerate(
                ModelRequest(
                    rid=uuid.uuid4().hex,
                    input_ids=input_ids,
                    image_data=images,
                    gconfig=self._gconfig.new(
                        n_samples=1, max_new_tokens=limit, max_tokens=self._config.agent.context_tokens
                    ),
                    tokenizer=self._tokenizer,
                    processor=self._processor,
                )
            )

        # AReaL's loop ends without cancelling our client's task. Registered once: an earlier registration is replaced.
        unregister_loop_cleanup(close_shared_clients)
        register_loop_cleanup(close_shared_clients)
        tracker = stats_tracker.get(workflow_context.stat_scope())

        def measured(name: str, value: float) -> None:
            tracker.scalar(**{f"envd/{name}": value})

        rows = await play_group(
            self._environments(), data, call, chat=self._chat, config=self._config, measured=measured
        )
        return await asyncio.to_thread(batch, rows, self._chat) if rows else None

    def _environments(self) -> Environments:
        return shared_client(self._config.client)
