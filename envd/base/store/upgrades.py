"""Upgrade a database that an earlier release wrote, one version of the schema at a time.

The forms of JSON here are those of the versions that they convert, so they stay as they are when the records change. A
value that cannot be converted is kept as it is: recovery then names its episode or request.
"""

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

Object = dict[str, Any]

_EPISODES_3 = """CREATE TABLE episodes (
    episode_id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    spec TEXT NOT NULL,
    progress TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    machine_id TEXT NOT NULL,
    connection TEXT NOT NULL,
    lease_ttl_s REAL NOT NULL,
    expire_time_s REAL NOT NULL
) WITHOUT ROWID"""
#: What a value that is not of its version raises.
_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError, RecursionError)
#: Columns of version 2 with text that both versions have.
_SPEC_TEXTS = ("episode_id", "group_id", "parent_episode_id", "task_id", "pool", "run", "owner", "max_steps")


def _from_1(connection: sqlite3.Connection) -> None:
    """Add what rollbacks, automatic checkpoints and tasks with a user need."""
    for column in (
        "epoch INTEGER NOT NULL DEFAULT 1",
        "last_checkpoint_id TEXT NOT NULL DEFAULT ''",
        "automatic TEXT NOT NULL DEFAULT '{}'",
        "asked TEXT NOT NULL DEFAULT '[]'",
    ):
        connection.execute(f"ALTER TABLE episodes ADD COLUMN {column}")


def _from_2(connection: sqlite3.Connection) -> None:
    """Store what never changes about an episode and what it has done as one value each, also in responses."""
    found = connection.execute("SELECT * FROM episodes")
    names = [column[0] for column in found.description]
    rows = [dict(zip(names, values, strict=True)) for values in found]
    connection.execute("DROP TABLE episodes")
    connection.execute(_EPISODES_3)
    specs = {}
    for row in rows:
        spec, progress = "", ""
        with suppress(*_UNREADABLE):
            specs[row["episode_id"]] = _spec_of(row)
            spec, progress = json.dumps(specs[row["episode_id"]]), json.dumps(_progress_of(row))
        kept = (row[name] for name in ("epoch", "machine_id", "bearings", "lease_ttl_s", "expire_time_s"))
        connection.execute(
            "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row["episode_id"], row["owner"], spec, progress, *kept),
        )
    for kind, scope, request_id, answer in connection.execute(
        "SELECT kind, scope, request_id, answer FROM answers WHERE answer != ''"
    ).fetchall():
        with suppress(*_UNREADABLE):
            connection.execute(
                "UPDATE answers SET answer = ? WHERE kind = ? AND scope = ? AND request_id = ?",
                (json.dumps(_answer_of(json.loads(answer), specs)), kind, scope, request_id),
            )


def _spec_of(row: Object) -> Object:
    """Return the spec of an episode of version 2. Its task's digest was not stored."""
    origin = json.loads(row["origin"])
    origin.pop("perturbations", None)
    return {
        **{name: row[name] for name in _SPEC_TEXTS},
        "task_digest": "",
        "settle": json.loads(row["settle"]),
        "automatic": json.loads(row["automatic"]),
        "origin": origin,
        "create_time": datetime.fromtimestamp(row["create_time_s"], UTC).isoformat(),
    }


def _progress_of(row: Object) -> Object:
    verdict = json.loads(row["verdict"]) if row["verdict"] else {}
    action = json.loads(row["last_action"]) if row["last_action"] else None
    return {
        **{name: row[name] for name in ("step_count", "last_checkpoint_id", "state", "end_reason", "cause")},
        "asked": json.loads(row["asked"]),
        "perturbations": json.loads(row["origin"]).get("perturbations", []),
        "last_action": None if action is None else {"action": action["kind"].lower(), **action["action"]},
        "score": {name: each for name, each in verdict.items() if name != "episode"} if "score" in verdict else None,
        "evaluator_error": verdict.get("failure", ""),
    }


def _answer_of(answer: Object, specs: Mapping[str, Object]) -> Object:
    """Return a response of version 2 with its episodes as those of version 3."""
    if "episode" in answer:
        return {**answer, "episode": _info_of(answer["episode"], specs)}
    if "episodes" in answer:
        return {**answer, "episodes": [_info_of(each, specs) for each in answer["episodes"]]}
    return answer


def _info_of(info: Object, specs: Mapping[str, Object]) -> Object:
    """Return an episode in a response. How its screen settles is known of episodes that are still open."""
    origin = dict(info["origin"])
    perturbations = origin.pop("perturbations", [])
    spec = {
        **{name: info.get(name, "") for name in _SPEC_TEXTS},
        "task_digest": "",
        "settle": specs.get(info["episode_id"], {}).get("settle", {}),
        "origin": origin,
        "create_time": info["create_time"],
    }
    progress = {
        **{name: info[name] for name in ("step_count", "state", "end_reason")},
        "cause": info.get("guest_end_cause", ""),
        "perturbations": perturbations,
    }
    rest = {"epoch": info.get("epoch", 1), "expire_time": info["expire_time"], "tools": info.get("tools", [])}
    return {"spec": spec, "progress": progress, **rest}


#: How to upgrade a database of each earlier version to the next one.
UPGRADES: Final[Mapping[int, Callable[[sqlite3.Connection], None]]] = {1: _from_1, 2: _from_2}
