"""Other distributions whose packages or commands have the names of ours."""

import sys
from importlib.metadata import PackageNotFoundError, version


def refuse_clash(name: str) -> None:
    """End the program if a distribution is installed that has a package or a command of this name.

    `envd` and `trainer` also exist on the Python package index. What was installed last has overwritten the other.
    """
    try:
        other = version(name)
    except PackageNotFoundError:
        return
    sys.exit(
        f"{name}: the distribution {name} {other} is installed, whose files have the names of ours; use an environment"
        f" of its own, or run pip uninstall {name} and reinstall envd-trainer"
    )
