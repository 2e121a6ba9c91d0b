"""The `trainer` command line."""


def main() -> None:
    """Run the command line."""
    from trainer.cli.app import app  # noqa: PLC0415 -- so that one part of this package can be imported without the rest

    app()
