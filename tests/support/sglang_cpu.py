"""Start SGLang's own server on a CPU, without its compiled kernels.

```shell
python -m tests.support.sglang_cpu --model-path DIRECTORY --port 30000
```

SGLang's Python code falls back to torch where a CPU lacks AMX, but looks its CPU kernels up while it is imported. Here
every look-up succeeds, and a kernel that is called after all raises an error. Needs SGLang and what it imports; see
`tests/sglang/requirements.txt`.
"""

import os
import sys
from typing import Any, NoReturn

import torch

_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--mm-attention-backend", "sdpa", "--grammar-backend", "none", "--dtype", "float32"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup", "--trust-remote-code"),
    *("--max-total-tokens", "60000", "--max-running-requests", "8", "--mem-fraction-static", "0.5"),
)


class _NoKernels:
    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def missing(*_: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name}: not available on this CPU")

        return missing


# Spawned processes import this module again before they run.
os.environ.update({"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"})
torch.ops.sgl_kernel = _NoKernels()
torch.set_num_threads(1)


def serve(flags: list[str]) -> None:
    """Serve until the process ends."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args([*_FLAGS, *flags]))


if __name__ == "__main__":
    serve(sys.argv[1:])
