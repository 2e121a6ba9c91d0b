"""Run AReaL's trainer on our desktops.

```shell
python -m trainer.adapters.areal.train --config areal.yaml scheduler.type=local
```

The file is AReaL's, with one additional key: `envd:`, see `config.ArealConfig`. AReaL refuses other
unknown keys. `train_dataset.path` names a file of JSON lines that `trainer data prompts` wrote.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.api.cli_args import GRPOConfig, load_expr_config

from trainer.adapters.areal.checks import check_credit
from trainer.adapters.areal.group import ArealConfig
from trainer.config import InputError


@dataclass
class DesktopGRPOConfig(GRPOConfig):  # type: ignore[misc] # AReaL is not installed for type checks
    """AReaL's configuration with our key."""

    envd: dict[str, Any] = field(default_factory=dict)
    """Settings of `ArealConfig`."""


def read_rows(path: Path, *, task_key: str) -> list[dict[str, str]]:
    """Return a data set row per line of a file. Raises: InputError: It cannot be read, or a line has no task id."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [{task_key: str(json.loads(line)["metadata"]["task_id"])} for line in lines]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"train_dataset.path: {path} is not a list of tasks ({type(error).__name__}: {error}); write one with"
            " `trainer data prompts`"
        ) from error


def main(argv: Sequence[str]) -> None:
    """Train. Raises: InputError: `envd:` or the tasks are invalid, or AReaL would change the credit of turns."""
    # Imported late: these load all of AReaL.
    from areal import PPOTrainer  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415

    config, _ = load_expr_config(list(argv), DesktopGRPOConfig)
    # Checked here, before a worker starts.
    envd = ArealConfig.from_mapping(config.envd)
    check_credit(config, envd)
    rows = read_rows(Path(config.train_dataset.path), task_key=envd.task_key)
    with PPOTrainer(config, train_dataset=Dataset.from_list(rows)) as trainer:
        trainer.train(
            workflow="trainer.adapters.areal.workflow.DesktopWorkflow",
            workflow_kwargs={
                "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path,
                "processor": None if config.envd.get("agent", {}).get("text_only") else config.tokenizer_path,
                "envd": config.envd,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
