"""The effective configuration of a recipe in a stage: checked by its plug-in, with every default.

A file has `envd:` and, for AReaL, AReaL's own configuration; `stages:` has the changes of each stage.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.adapters.areal.group import ArealConfig
from trainer.agent.settings import AgentSettings
from trainer.config import InputError
from trainer.slime.config import SlimeConfig

STAGES = ("smoke-env", "smoke-text", "smoke", "full")
"""Stages in running order: desktops only, one rollout without pictures, one with pictures, the complete run."""
_DIRECTORY = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def launcher(name: str) -> Path:
    """Return a recipe's launcher script. Raises: InputError."""
    _check_name(name)
    return _DIRECTORY / f"{name}.sh"


def purpose(name: str) -> str:
    """Return what a recipe trains, with which model and how many GPUs. Raises: InputError."""
    # The second line of a launcher: `# Purpose. See FILES.`
    return launcher(name).read_text(encoding="utf-8").splitlines()[1].removeprefix("# ").partition(". See")[0]


def effective(name: str, *, stage: str, hosts: str = "") -> Mapping[str, Any]:
    """Return all keys of a recipe in one stage, defaults included.

    Args:
        name: One of `names()`.
        stage: One of `STAGES`.
        hosts: Daemons, separated by commas; empty for those in the file.

    Raises:
        InputError: The recipe, the stage or a key is unknown, or a value is invalid.
    """
    _check_name(name)
    if stage not in STAGES:
        raise InputError(f"stage {stage!r}: unknown; stages: {', '.join(STAGES)}")
    content = yaml.safe_load((_DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8"))
    stages = content.pop("stages", {})
    unknown = [key for key in stages if key not in STAGES]
    if unknown:
        raise InputError(f"recipe {name}: unknown stages {', '.join(unknown)}; stages: {', '.join(STAGES)}")
    merged = _merged(content, stages.get(stage) or {})
    if hosts:
        merged["envd"]["hosts"] = [host.strip() for host in hosts.split(",")]
    try:
        return _checked(merged)
    except ValueError as error:
        raise InputError(f"recipe {name}, stage {stage}: {error}") from error


def agent_of(config: Mapping[str, Any]) -> AgentSettings:
    """Return the agent's settings of a recipe in a stage. Raises: InputError."""
    return AgentSettings.from_mapping(config["envd"]["agent"])


def _checked(merged: dict[str, Any]) -> Mapping[str, Any]:
    extra = [key for key in merged if key != "envd"]
    if extra and "actor" not in merged:
        # slime would set each as an attribute of its arguments, unchecked.
        raise InputError(
            f"unknown keys {', '.join(extra)}; only envd is allowed, slime's arguments are in the launcher"
        )
    kind = ArealConfig if "actor" in merged else SlimeConfig
    envd = kind.from_mapping(merged["envd"]).model_dump(mode="json", exclude_none=True)
    return {**merged, "envd": envd}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return result


def _check_name(name: str) -> None:
    if name not in names():
        raise InputError(f"recipe {name!r}: unknown; recipes: {', '.join(names())}")
