"""Run `envd serve` as a separate process."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.program import Program


class ServedDaemon(Program):
    """One `envd serve` process on free ports."""

    def __init__(
        self,
        state_dir: Path,
        config_text: str,
        *flags: str,
        listen: str = "127.0.0.1:0",
        within: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Start it.

        Args:
            state_dir: Its state directory; configuration and log go to the same parent.
            config_text: Configuration as TOML.
            flags: More flags of the command.
            listen: Its address, for a daemon that replaces another.
            within: Prefix of the command line: a program that executes its arguments.
            variables: Environment variables in addition to this process's.
        """
        config = state_dir.parent / f"{state_dir.name}.toml"
        config.write_text(config_text, encoding="utf-8")
        self.log_file = state_dir.parent / f"{state_dir.name}.log"
        command = [sys.executable, "-m", "envd", "serve", "--config", str(config), "--state-dir", str(state_dir)]
        addresses = ["--listen", listen, "--metrics-listen", "127.0.0.1:0"]
        super().__init__(*within, *command, *addresses, *flags, errors=self.log_file, env={**os.environ, **variables})
