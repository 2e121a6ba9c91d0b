"""Plug-in that runs verl's trainer on a CPU, with a scripted engine; each of verl's processes imports it.

verl has platforms for accelerators only, and its engines for rollouts need a GPU. This registers a platform and an
engine in verl's own registries, and changes one call: for a CPU, verl names the backend of that device twice. Use:
`VERL_USE_EXTERNAL_MODULES=cpu_plugin VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda`, which selects the engine FSDP.
The file `CHECKSUMS` gets a line for the weights that the engine starts with, and one after each step.
"""

import itertools
import json
import os
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import ray
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

#: Name of the engine.
SCRIPTED = "scripted"

_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """Correct verl's backend; see the module."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)


torch.distributed.init_process_group = init_process_group


class CpuModule(ModuleType):
    """Stands for `torch.cuda`: functions about memory and streams have no effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"get_device_name": "CPU", "mem_get_info": (1 << 30, 1 << 31)}
        return getattr(torch.cpu, name, lambda *_, **__: known.get(name, 0))


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """A CPU, which Ray counts as one GPU: verl places its workers by GPUs."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        pass


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


class ScriptedServer:
    """The engine: every other session clicks the box Enabled of `fake/enable` first; then each is done."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=True)
        self._sessions = itertools.count()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: Any, **_: Any
    ) -> TokenOutput:
        """Return the reply to a prompt; the number of its screenshots is that of the turn."""
        assert sampling_params["logprobs"], (request_id, len(prompt_ids))
        clicks = len(image_data) == 1 and next(self._sessions) % 2 == 0
        click = call(action="left_click", coordinate=[642, 209])  # thousandths
        reply = click if clicks else call(action="terminate", status="success")
        ids = self._tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        return TokenOutput(
            token_ids=ids, log_probs=[-0.25] * len(ids), stop_reason="completed", extra_fields={"global_steps": 0}
        )

    async def wake_up(self) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def abort_all_requests(self, **_: Any) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    async def clear_kv_cache(self) -> None:
        pass


class ScriptedReplica(RolloutReplica):  # type: ignore[misc]
    """Starts the server."""

    async def launch_servers(self) -> None:
        server = ray.remote(ScriptedServer).options(num_cpus=0).remote(self.model_config.path)
        self.servers = [server]
        self._server_handle, self._server_address = server, SCRIPTED


class ScriptedRollout(BaseRollout):  # type: ignore[misc]
    """The trainer's side of the engine, which receives the weights."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None], **_: Any) -> None:
        checksum = sum(float(tensor.double().abs().sum()) for _, tensor in weights)
        _note(checksum)


def _note(checksum: float) -> None:
    with open(os.environ["CHECKSUMS"], "a") as file:
        print(checksum, file=file)


RolloutReplicaRegistry.register(SCRIPTED, lambda: ScriptedReplica)
_ROLLOUT_REGISTRY[SCRIPTED, "async"] = f"{__name__}.ScriptedRollout"
