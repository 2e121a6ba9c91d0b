"""The `envd` command line, and the composition root of the daemon."""


def main() -> None:
    """Run the command line."""
    from envd.cli.app import app  # noqa: PLC0415 -- so that one part of this package can be imported without the rest

    app()
