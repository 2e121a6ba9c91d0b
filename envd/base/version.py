"""The installed release."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "envd-trainer"


@cache
def envd_version() -> str:
    """Return the installed release, or `uninstalled` if envd runs from a source tree."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "uninstalled"
