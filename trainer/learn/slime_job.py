"""slime's own rollout, evaluation and conversion in one process, without Ray, Megatron and SGLang.

slime is a checkout; modules of it that need a GPU cluster import packages that this process does not have, which empty
stand-ins replace.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.learn import LearnError
from trainer.learn.setup import is_checkout
from trainer.slime.hooks import data_source
from trainer.slime.play.samples import flatten

#: Packages that slime imports and a rollout does not use. slime imports `qwen_vl_utils` for each task of a data set:
#: each search that did not find it took 14 ms.
ABSENT = ("megatron", "pylatexenc", "qwen_vl_utils", "ray", "requests", "sglang", "sglang_router", "urllib3", "wandb")


class _Nothing:
    """Stands for any class or function of an absent package; as a decorator it changes nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


def _attribute(name: str) -> Any:
    """Return an attribute of an absent package. Raises: AttributeError: It is Python's own."""
    if name.startswith("__"):
        raise AttributeError(name)
    # A class, so that others may inherit from it and annotations with `|` work.
    return _Nothing() if name in ("remote", "method") else type(name, (_Nothing,), {})


class StandIns(MetaPathFinder, Loader):
    """Finds an empty module for each import of some packages. Last in `sys.meta_path`, only for absent ones."""

    def __init__(self, attributes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Take attributes that a stand-in has, by the name of its module."""
        self._attributes = attributes or {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:  # noqa: ARG002
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in ABSENT else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update({"__version__": "1.0.0", "__getattr__": _attribute})
        vars(module).update(self._attributes.get(module.__name__, {}))


def use_slime(home: Path) -> None:
    """Make `import slime` find a checkout. Raises: LearnError: There is none."""
    if not is_checkout(home):
        raise LearnError(f"slime {home}: not a checkout of slime; run `trainer learn setup`")
    if str(home) not in sys.path:
        sys.path.insert(0, str(home))
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())


class SlimeRollouts:
    """slime's data source, rollout functions and conversion to train data, for one process."""

    def __init__(self, args: Namespace) -> None:
        """Open slime's connections and data set."""
        self.args = args
        http: Any = import_module("slime.utils.http_utils")
        http._http_client = None
        http.init_http_client(args)
        self._http = http
        self._functions: Any = import_module("slime.rollout.sglang_rollout")
        self.data_source = data_source(args)
        self._ray_rollout: Any = import_module("slime.ray.rollout")
        manager = self._ray_rollout.RolloutManager
        # Ray's decorator keeps the class; the stand-in's is the class itself.
        metadata = getattr(manager, "__ray_metadata__", None)
        self._manager_class = manager if metadata is None else metadata.modified_class

    def rollout(self, rollout_id: int = 0) -> Any:
        """Run one synchronous rollout; returns slime's RolloutFnTrainOutput."""
        return self._functions.generate_rollout(self.args, rollout_id, self.data_source)

    def evaluate(self, rollout_id: int = 0) -> Any:
        return self._functions.generate_rollout(self.args, rollout_id, self.data_source, evaluation=True)

    def train_data(self, groups: Sequence[Any]) -> dict[str, Any]:
        """Return groups as slime's rollout manager checks, flattens and converts them."""
        manager = self._manager_class.__new__(self._manager_class)
        manager.args = self.args
        manager.custom_convert_samples_to_train_data_func = None
        load = import_module("slime.utils.misc").load_function
        manager.custom_reward_post_process_func = load(self.args.custom_reward_post_process_path)
        # Releases that train Qwen3-VL have an underscore in front.
        name = "validate_rollout_id_annotated"
        (getattr(self._ray_rollout, name, None) or getattr(self._ray_rollout, f"_{name}"))(list(groups))
        data: dict[str, Any] = manager._convert_samples_to_train_data(flatten(groups))
        return data


def write_tasks(path: Path, ids: Sequence[str]) -> Path:
    """Write a data set of slime's, one line per task; return its path."""
    rows = [{"prompt": [{"role": "user", "content": each}], "metadata": {"task_id": each}} for each in ids]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def slime_args(envd: Mapping[str, Any], **given: Any) -> Namespace:
    """Return slime's arguments, with the defaults of its parser and our hooks.

    Needs slime.
    """
    provider: Any = import_module("slime.utils.arguments").get_slime_extra_args_provider()
    parser = provider(argparse.ArgumentParser(allow_abbrev=False))
    # The only required flag.
    defaults = parser.parse_args(["--rollout-batch-size", "1"])
    return Namespace(**{**vars(defaults), **OVERRIDES, "envd": dict(envd), **given})


#: Arguments that differ from the parser's defaults, or that slime adds when it starts its cluster.
OVERRIDES: dict[str, Any] = {
    "rollout_shuffle": True,
    "rollout_num_engines": 1,
    "rollout_num_gpus": 1,
    "input_key": "prompt",
    "tool_key": None,
    "apply_chat_template": True,
    "sglang_dp_size": None,
    "sglang_server_concurrency": 1024,
    "router_policy": None,
    "load_debug_rollout_data": None,
    "use_rollout_logprobs": True,  # the ratio of the loss is to the policy that sampled
    "custom_generate_function_path": "trainer.slime.hooks.generate",
    "data_source_path": "trainer.slime.hooks.data_source",
    "custom_rm_path": "trainer.slime.hooks.reward_func",
    "custom_reward_post_process_path": "trainer.slime.hooks.normalize_rewards",
}
