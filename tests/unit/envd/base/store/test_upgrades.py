"""Databases of earlier releases are upgraded: what they say of episodes and responses is read, or refused by name."""

import json
import sqlite3
from pathlib import Path

import pytest

from envd.base.errors import ConfigError
from envd.base.store import upgrades
from envd.base.store.store import SCHEMA, AnswerRow, EpisodeRow, SqliteStore

#: The table of version 2.
EPISODES_2 = """
CREATE TABLE episodes (episode_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, parent_episode_id TEXT NOT NULL,
    task_id TEXT NOT NULL, pool TEXT NOT NULL, run TEXT NOT NULL, owner TEXT NOT NULL, max_steps INTEGER NOT NULL,
    settle TEXT NOT NULL, origin TEXT NOT NULL, create_time_s REAL NOT NULL, machine_id TEXT NOT NULL,
    state TEXT NOT NULL, end_reason TEXT NOT NULL, cause TEXT NOT NULL, step_count INTEGER NOT NULL,
    epoch INTEGER NOT NULL, last_checkpoint_id TEXT NOT NULL, automatic TEXT NOT NULL, last_action TEXT NOT NULL,
    verdict TEXT NOT NULL, asked TEXT NOT NULL, bearings TEXT NOT NULL, lease_ttl_s REAL NOT NULL,
    expire_time_s REAL NOT NULL) WITHOUT ROWID;
"""
OTHERS = SCHEMA[SCHEMA.index("CREATE TABLE answers") :]
ROW = {
    "episode_id": "ep-1",
    "group_id": "group-1",
    "parent_episode_id": "",
    "task_id": "suite/name",
    "pool": "desktop",
    "run": "",
    "owner": "alice",
    "max_steps": 5,
    "settle": "{}",
    "origin": '{"template_digest": "t", "overlay_parent": "o", "first_frame_id": "f", "perturbations": ["theme"]}',
    "create_time_s": 1_900_000_000.0,
    "machine_id": "m1",
    "state": "active",
    "end_reason": "",
    "cause": "",
    "step_count": 3,
    "epoch": 2,
    "last_checkpoint_id": "ckpt-1",
    "automatic": "{}",
    "last_action": "",
    "verdict": "",
    "asked": "[]",
    "bearings": '{"pointer": null}',
    "lease_ttl_s": 300.0,
    "expire_time_s": 1_900_000_300.0,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "envd.db"


def write(path: Path, row: dict[str, object], *, version: int = 2, answer: str = "") -> None:
    connection = sqlite3.connect(path)
    new = ("epoch", "last_checkpoint_id", "automatic", "asked")
    table = EPISODES_2
    if version == 1:
        for name in new:
            table = table.replace(f" {name} {'INTEGER' if name == 'epoch' else 'TEXT'} NOT NULL,", "")
        row = {name: value for name, value in row.items() if name not in new}
    connection.executescript(f"PRAGMA application_id = {0x656E7664}; {table} {OTHERS} PRAGMA user_version = {version};")
    connection.execute(
        f"INSERT INTO episodes ({', '.join(row)}) VALUES ({', '.join('?' for _ in row)})",  # noqa: S608 -- our names
        tuple(row.values()),
    )
    connection.execute("INSERT INTO answers VALUES ('step', 'ep-1', 'r', x'00', ?, 1.5)", (answer,))
    connection.commit()
    connection.close()


async def upgraded(path: Path) -> tuple[EpisodeRow, AnswerRow]:
    for _ in range(2):  # the second start finds it upgraded
        store = SqliteStore(path)
        (row,), (answer,) = await store.rows(EpisodeRow), await store.rows(AnswerRow)
        await store.aclose()
    return row, answer


@pytest.mark.parametrize("version", [1, 2])
async def test_an_episode_of_an_earlier_version_has_its_spec_and_its_progress(path: Path, version: int) -> None:
    write(path, ROW, version=version)
    row, _ = await upgraded(path)
    assert (row.episode_id, row.owner, row.machine_id, row.lease_ttl_s) == ("ep-1", "alice", "m1", 300.0)
    assert row.epoch == (2 if version == 2 else 1)
    spec, progress = json.loads(row.spec), json.loads(row.progress)
    assert (spec["task_id"], spec["max_steps"], spec["create_time"]) == ("suite/name", 5, "2030-03-17T17:46:40+00:00")
    assert spec["origin"] == {"template_digest": "t", "overlay_parent": "o", "first_frame_id": "f"}
    assert (progress["step_count"], progress["perturbations"]) == (3, ["theme"])


@pytest.mark.parametrize(
    "changes",
    [
        {"settle": "{"},
        {"origin": "[]"},
        {"origin": "7"},
        {"verdict": "[1]"},
        {"last_action": '{"kind": 1}'},
        {"last_action": "[]"},
        {"asked": "["},
        {"create_time_s": 1e300},
        {"create_time_s": "never"},
        {"pool": b"\xff"},
        {"asked": "[" * 100_000},
    ],
)
async def test_an_episode_that_cannot_be_converted_is_kept(path: Path, changes: dict[str, object]) -> None:
    write(path, ROW | changes, answer=json.dumps({"episode": {"origin": 1}}))
    row, answer = await upgraded(path)
    assert (row.episode_id, row.owner, row.progress) == ("ep-1", "alice", "")
    assert answer.answer == '{"episode": {"origin": 1}}'


async def test_an_upgrade_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, ROW)

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE answers")
        connection.execute("SELECT * FROM nowhere")

    monkeypatch.setattr("envd.base.store.store.UPGRADES", {2: fail})
    with pytest.raises(ConfigError, match="nowhere"):
        SqliteStore(path)
    monkeypatch.setattr("envd.base.store.store.UPGRADES", upgrades.UPGRADES)
    row, _ = await upgraded(path)
    assert row.episode_id == "ep-1"
