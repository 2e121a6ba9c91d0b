"""The rows of the database and the statements that write them. Pure: `store` executes the statements.

Times are seconds since 1970, on the host's clock: the monotonic one does not survive a restart of the host.
"""

from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

#: Version of the schema below. A newer database is refused; an older one is upgraded, see `upgrades`.
SCHEMA_VERSION = 3

SCHEMA = (files("envd.base.store") / "schema.sql").read_text(encoding="ascii")


class Statement(NamedTuple):
    """One change."""

    sql: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode that holds a lease."""

    episode_id: str
    owner: str
    """Name of the token that created it."""
    spec: str
    """Its `EpisodeSpec` as JSON."""
    progress: str
    """Its `Progress` after the last step as JSON."""
    epoch: int
    machine_id: str
    connection: str
    """Connection state of its desktop after the last step, as JSON."""
    lease_ttl_s: float
    expire_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """One request that changes something, written before it does."""

    kind: str
    """reset, step, evaluate, fork or rollback."""
    scope: str
    """The episode id; empty for a reset."""
    request_id: str
    fingerprint: bytes
    answer: str
    """The response as JSON; empty while the request runs, and after a crash during it."""
    time_s: float
    """Time of the write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """One machine that exists, or may exist; written before the hypervisor is asked for it."""

    machine_id: str
    pool: str
    enter_time_s: float


Row = TypeVar("Row", EpisodeRow, AnswerRow, MachineRow)

TABLES: dict[type[Any], str] = {EpisodeRow: "episodes", AnswerRow: "answers", MachineRow: "machines"}


def is_well_typed(row: EpisodeRow | AnswerRow | MachineRow) -> bool:
    """Return whether every value has its column's type; SQLite stores any value in any column."""
    return all(isinstance(getattr(row, field.name), field.type) for field in fields(row))  # type: ignore[arg-type]


def upsert(row: EpisodeRow | AnswerRow | MachineRow) -> Statement:
    """Insert a row, or replace the row of the same key."""
    kind = type(row)
    return Statement(_PUT[kind], tuple([getattr(row, name) for name in COLUMNS[kind]]))


#: Column names by table, in the order of the row's fields.
COLUMNS: dict[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in (EpisodeRow, AnswerRow, MachineRow)
}
_PUT = {
    kind: f"INSERT OR REPLACE INTO {TABLES[kind]} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608
    for kind, names in COLUMNS.items()
}


def renew_lease(episode_id: str, *, lease_ttl_s: float, expire_time_s: float) -> Statement:
    return Statement(
        "UPDATE episodes SET lease_ttl_s = ?, expire_time_s = ? WHERE episode_id = ?",
        (lease_ttl_s, expire_time_s, episode_id),
    )


def delete_episode(episode_id: str) -> tuple[Statement, ...]:
    return (
        Statement("DELETE FROM episodes WHERE episode_id = ?", (episode_id,)),
        Statement("DELETE FROM answers WHERE scope = ?", (episode_id,)),
    )


def delete_answer(*, kind: str, scope: str, request_id: str) -> Statement:
    return Statement("DELETE FROM answers WHERE scope = ? AND kind = ? AND request_id = ?", (scope, kind, request_id))


def delete_machine(machine_id: str) -> Statement:
    return Statement("DELETE FROM machines WHERE machine_id = ?", (machine_id,))
