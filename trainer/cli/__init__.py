"""The `trainer` command line."""

import sys

from cuaenv.cli.clash import refuse_clash


def main() -> None:
    """Run the command line."""
    refuse_clash("trainer")
    try:
        from trainer.cli.app import app  # noqa: PLC0415 -- importing one module must not import all

        app()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("trainer", "cuaenv"):
            raise
        sys.exit(f"trainer: the Python module {error.name} is missing; run pip install 'envd-trainer[trainer]'")
