"""The table of docs/settings.md, from the settings, their defaults and their descriptions."""

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from envd.base import config
from envd.base.config_sources import fields, load

#: Defaults that depend on the host or on other settings.
_COMPUTED = {
    "state_dir": "`/var/lib/envd` for root, else `~/.local/state/envd`",
    "cache_dir": "`~/.cache/envd`",
    **dict.fromkeys(("pools.*.image", "pools.*.capacity", "pools.*.resident", "pools.*.max_starting"), ""),
}


def text() -> str:
    """Return the table: one row per setting, in the order of the fields."""
    defaults = load(flags={"pools": {"a": {}}, "limits.runs": {"a": {}}})
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key in (name.replace("NAME", "*") for name in fields()):
        section, default = _section_and_value(defaults, key)
        meaning = _descriptions(section)[key.rpartition(".")[2]]
        rows.append(f"| `{key}` | {_COMPUTED[key] if key in _COMPUTED else _cell(default)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _section_and_value(section: Any, key: str) -> tuple[type, object]:
    value = section
    for part in key.replace("*", "a").split("."):
        section, value = value, value[part] if isinstance(value, dict) else getattr(value, part)
    return type(section), value


def _descriptions(section: type) -> dict[str, str]:
    """Return the text after each field, also of the classes that the section extends."""
    return dict(pair for kind in reversed(section.__mro__) for pair in _described(kind))


def _described(kind: type) -> Iterator[tuple[str, str]]:
    if kind.__module__ != config.__name__:
        return
    [body] = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    for field, following in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            yield ast.unparse(field.target), " ".join(str(ast.literal_eval(following.value)).split())


def _cell(default: object) -> str:
    """Return a default in TOML."""
    match default:
        case None | "":
            return ""
        case ():
            return "`[]`"
        case bool():
            return f"`{str(default).lower()}`"
        case float():
            return f"`{default:g}`"
        case _:
            return f"`{default}`"
