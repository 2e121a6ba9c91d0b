"""Options that several commands share, and their parsing."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cuaenv.client import AsyncEnvClient, Tls
from cuaenv.problems import without_path
from trainer.agent.settings import AgentSettings
from trainer.cli.output import UsageError
from trainer.learn.setup import default_home, is_checkout

DEFAULT_TARGET = "127.0.0.1:50051"
Target = Annotated[
    str,
    typer.Option("--envd", metavar="HOST:PORT", envvar="ENVD_TARGET", help="The daemon.", show_default=DEFAULT_TARGET),
]
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", help="Certificate of the authority that signed the daemon's; enables TLS.")
]
RunName = Annotated[
    str, typer.Option("--run", help="Label of the episodes at the daemon, for fair share, quotas and metrics.")
]
PoolName = Annotated[str, typer.Option("--pool", help="The daemon's pool; default: each task's own.")]
AgentFile = Annotated[
    Path | None,
    typer.Option("--agent", help="YAML file with the agent's settings, as for training; default: all defaults."),
]
Screen = Annotated[str, typer.Option(help="Size of the guest's screen in pixels, for the coordinates of oracles.")]
SlimeHome = Annotated[
    Path | None, typer.Option(envvar="SLIME_HOME", help="Checkout of slime; default: that of `trainer learn setup`.")
]
DEFAULT_RUN = "evaluation"
DEFAULT_SCREEN = "1280x800"


def make_client(target: str, tls_ca: Path | None, *, run: str = DEFAULT_RUN) -> AsyncEnvClient:
    """Return a client of the daemon; its token comes from `ENVD_TOKEN`. Raises: UsageError."""
    try:
        tls = None if tls_ca is None else Tls(ca=tls_ca)
        if tls is not None:
            tls.credentials()
        return AsyncEnvClient(target, run=run, tls=tls, expects_idle=True)
    except ValueError as error:
        raise UsageError(f"--envd {target}: {error}") from error
    except OSError as error:
        raise UsageError(f"--tls-ca {tls_ca}: cannot be read: {error.strerror}") from error


def read_settings(file: Path | None, **changes: Any) -> AgentSettings:
    """Return the agent's settings from a file, overridden by flags.

    The file has them at the top level, under `agent:`, or under `envd: agent:` in a training configuration.

    Raises:
        UsageError: It cannot be read, has an unknown key, or its budgets do not add up.
    """
    held: Any = {}
    if file is not None:
        try:
            held = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"--agent {file} cannot be read: {without_path(error)}") from error
        for key in ("envd", "agent"):
            if isinstance(held, dict) and isinstance(held.get(key), dict):
                held = held[key]
        if not isinstance(held, dict):
            raise UsageError(f"--agent {file} has no settings; example: `max_turns: 15`")
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        return AgentSettings.from_mapping({**held, **given})
    except ValueError as error:
        raise UsageError(f"agent settings: {error}") from error


def slime_checkout(home: Path | None) -> Path:
    """Return the directory of slime, and prepare this process for it: no downloads, no bars. Raises: UsageError."""
    home = (home or default_home()).expanduser().resolve()
    if not is_checkout(home):
        raise UsageError(f"slime {home}: not a checkout; run `trainer learn setup`, or set --slime-home or SLIME_HOME")
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
    return home


def read_screen(text: str) -> tuple[int, int]:
    """Return a size (width, height) in pixels. Raises: UsageError."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise UsageError(f"--screen {text} is not a size; use WIDTHxHEIGHT, such as {DEFAULT_SCREEN}")
    return int(width), int(height)


IncludeUnrunnable = Annotated[
    bool, typer.Option("--include-unrunnable", help="Also tasks that the daemon's host cannot run.")
]
LIST_TIMEOUT = timedelta(seconds=20)
"""Timeout of list requests: short, so that a missing daemon is reported soon."""
