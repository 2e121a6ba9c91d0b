"""Bundles of CUA-Gym as tasks: `meta.json instruction.md exec/ hidden/ setup.sh gt/ check.sh` in a directory each."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from envd.base.config_values import CUA_GYM
from envd.integrations.cua_gym.bundle import CHECK_PARTS, SETUP_COMMANDS
from envd.tasks.archives import entries
from envd.tasks.fields import task_name
from envd.tasks.formats.entries import Fields, Found, Problem, Source, TaskFormatError, make_task

_DRIVER = "uda-gym"
_REQUIRED = ("meta.json", "instruction.md", "setup.sh", "check.sh")
_MAX_TEXT_BYTES = 1 << 20
_MAX_STEPS = 100
#: The bundles are not graded.
_LEVEL = 3
#: What a bundle needs that guests do not have, by what its scripts contain.
_NEEDS = (
    ("cua-gym-hub", re.compile(r"CUA_GYM_ADMIN_TOKEN|cua-gym-[a-z0-9-]+\.xlang\.ai")),
    (
        "internet",
        re.compile(
            r"\b(?:pip3? install|apt(?:-get)? install|git clone)\b"
            r"|\b(?:curl|wget)\b[^\n]*https?://(?!127\.0\.0\.1|localhost)"
        ),
    ),
)


def is_bundle(directory: Path) -> bool:
    return (directory / "meta.json").is_file() or (directory / "check.sh").is_file()


def read_bundles(directory: Path) -> Found:
    """Yield the tasks and the problems of a directory of bundles, or of one bundle, in name order."""
    if not directory.is_dir():
        yield Problem(where=str(directory), message="no such directory; name the directory that has the bundles")
        return
    found = [directory] if is_bundle(directory) else sorted(each for each in directory.iterdir() if is_bundle(each))
    if not found:
        yield Problem(where=str(directory), message="has no bundle: no directory with meta.json and check.sh")
    for bundle in found:
        yield from _read_bundle(bundle.resolve())


def _read_bundle(bundle: Path) -> Found:
    source = Source(file=str(bundle), directory=None, suite=CUA_GYM, makes_bundles=True)
    name = task_name(bundle.name)
    yield from make_task(source, lambda: (name, lambda: _fields(bundle)), locate=lambda _: source.file)


def _fields(bundle: Path) -> Fields:
    missing = [name for name in _REQUIRED if not (bundle / name).is_file()]
    if missing:
        raise TaskFormatError(f"the bundle lacks {', '.join(missing)}")
    try:
        meta = json.loads(_text(bundle / "meta.json"))
    except ValueError as error:
        raise TaskFormatError(f"meta.json is not JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("driver", _DRIVER) != _DRIVER:
        raise TaskFormatError(f"meta.json is not an object with the driver {_DRIVER}")
    for parts in (*(parts for _, parts in SETUP_COMMANDS), CHECK_PARTS):
        try:
            for _ in entries(bundle, parts):
                pass
        except (ValueError, OSError) as error:
            raise TaskFormatError(str(error)) from None
    return {
        "instruction": _text(bundle / "instruction.md").strip(),
        "level": _LEVEL,
        "max_steps": _MAX_STEPS,
        "needs": tuple(_needs(bundle)),
        "setup": [{"kind": "cua_gym", "bundle": str(bundle)}],
        "checker": {"kind": "cua_gym", "bundle": str(bundle)},
    }


def _needs(bundle: Path) -> Iterator[str]:
    scripts = _text(bundle / "setup.sh") + _text(bundle / "check.sh")
    for need, pattern in _NEEDS:
        if pattern.search(scripts):
            yield need
    names = bundle / "harness_env.tsv"
    if names.is_file():
        for name in _text(names).split():
            if name != "CUA_GYM_ADMIN_TOKEN":
                yield task_name(name)[:31]


def _text(path: Path) -> str:
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise TaskFormatError(f"{path.name} has more than {_MAX_TEXT_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFormatError(f"{path.name} cannot be read: {error}") from None
