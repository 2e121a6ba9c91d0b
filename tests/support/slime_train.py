"""slime's own `train.py` without GPUs: real arguments, data source, rollout manager, engine actors and router.

```shell
python -m tests.support.slime_train SLIME_HOME train FLAGS     # or train_async
```

Only the model that learns is replaced: `Learner` reads its batches as Megatron's ranks would, writes them to
`trained.jsonl` in `--save`, and updates the engines' weights from `--hf-checkpoint`. Engines are external
(`--rollout-external-engine-addrs`). The job runs in the Ray cluster at `RAY_ADDRESS`; without one it starts its own.
"""

import json
import os
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support import stand_ins

#: Ranks that share the batches.
_RANKS = 2
_PARALLEL = {"dp_size": _RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


class Learner:
    """The trained model, as `train.py` uses it; nothing learns."""

    def __init__(self, args: Namespace, manager: Any) -> None:
        """Continue after the last saved rollout."""
        self._ray = import_module("ray")
        self._args = args
        self._manager = manager
        self._directory = Path(args.save)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._version = 0
        self._get(manager.set_train_parallel_config.remote(_PARALLEL))
        saved = self._directory / "latest_checkpointed_iteration.txt"
        args.start_rollout_id = int(saved.read_text()) + 1 if saved.exists() else 0
        self._get(manager.load.remote(args.start_rollout_id - 1))

    def _get(self, refs: Any) -> Any:
        return self._ray.get(refs)

    def update_weights(self) -> None:
        """Pause the engines, load the weights as a new version, and continue."""
        self._version += 1
        engines, *_ = self._get(self._manager.get_updatable_engines_and_lock.remote())
        self._get([engine.pause_generation.remote() for engine in engines])
        self._get(
            [
                engine.update_weights_from_disk.remote(self._args.hf_checkpoint, weight_version=str(self._version))
                for engine in engines
            ]
        )
        self._get([engine.continue_generation.remote() for engine in engines])

    def async_train(self, rollout_id: int, boxes: Any) -> list[Any]:
        """Write one line: the batch of each rank."""
        columns = ("sample_indices", "rewards", "raw_reward", "response_lengths", "truncated")
        ranks = []
        for box in boxes:
            data = self._get(box.inner)
            taken = {name: [_plain(value) for value in data[name]] for name in columns}
            ranks.append({**taken, "trained": [int(mask.sum()) for mask in data["loss_masks"]]})
        line = {"rollout_id": rollout_id, "ranks": ranks}
        with (self._directory / "trained.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return []

    def save_model(self, rollout_id: int, *, force_sync: bool) -> None:
        """Save the number of the last rollout."""
        (self._directory / "latest_checkpointed_iteration.txt").write_text(str(rollout_id))

    def clear_memory(self) -> None:
        """Do nothing."""


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def setup_worker() -> None:
    """Prepare a worker of Ray, whose engine actors ask for the number of a GPU."""
    stand_ins.install()
    accelerator: Any = import_module("slime.utils.accelerator")
    accelerator.resolve_visible_device_id = lambda number: number


def run(home: Path, script: str) -> None:
    """Run slime's `train` or `train_async` with the flags in `sys.argv`."""
    sys.path.insert(0, str(home))
    stand_ins.install()
    # Loopback only; no hub is contacted.
    os.environ.update({"SLIME_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1"})
    ray = import_module("ray")
    own: dict[str, Any] = {
        "address": "local",
        "num_cpus": 8,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "object_store_memory": 1 << 29,
    }
    ray.init(
        **({} if os.environ.get("RAY_ADDRESS") else own),
        runtime_env={
            "worker_process_setup_hook": setup_worker,
            "env_vars": {"PYTHONPATH": os.pathsep.join([str(home), *sys.path[1:]])},
        },
    )
    module: Any = import_module(script)
    module.create_placement_groups = lambda _: {"actor": None, "rollout": None, "critic": None}
    module.create_training_models = lambda args, _, manager: (Learner(args, manager), None)
    module.train(import_module("slime.utils.arguments").parse_args())
    ray.shutdown()


if __name__ == "__main__":
    _, home, script, *flags = sys.argv
    sys.argv = [f"{script}.py", *flags]
    run(Path(home), script)
