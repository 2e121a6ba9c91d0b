"""The installed release."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "envd-trainer"


def envd_version() -> str:
    """Return the installed release, or `uninstalled` if envd runs from a source tree."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "uninstalled"
