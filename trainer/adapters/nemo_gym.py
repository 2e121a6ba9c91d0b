"""NeMo Gym's protocol for checkpoints of unfinished rollouts, for a resources server whose sessions are desktops.

Written from the open pull requests 2940, 2945, 2946 and 3349 of NVIDIA-NeMo/Gym and 4093 of NVIDIA-NeMo/RL (schema
version 1). No released package has it, so it was tested against a stub of their controller only. The server passes the
JSON bodies of `/ng-control/v1/capabilities` and `/ng-control/v1/resources-checkpoint/OPERATION` on, and authenticates
its callers. An abort is a `resume`, as there.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cuaenv.client import Checkpoint
from trainer.adapters.session import Score, Session, SessionSettings, open_session
from trainer.replay.pool import write_atomically

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
_Phase = Literal[
    "idle", "preparing", "prepared", "committed_paused", "restoring", "restore_failed_paused", "restored_paused"
]


class ProtocolError(Exception):
    """A request that does not fit the state; nothing was done. An HTTP server answers 409."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Literal[1]
    checkpoint_id: _Name


class _Control(_Strict):
    deadline_ts: float
    checkpoint_dir: str = ""


class _Execution(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout_id: _Name
    attempt_index: int = Field(ge=0)
    revision: int = Field(ge=0)
    checkpoint: Checkpoint | None = None
    score: Score | None = None
    """Score of a session that its agent had ended, which has no checkpoint."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.checkpoint is None) == (self.score is None):
            raise ValueError("give either checkpoint or score")
        return self


class _Manifest(_Strict):
    participant: _Name
    executions: tuple[_Execution, ...] = Field(strict=False)


@dataclass(eq=False, slots=True)
class _Bound:
    """A rollout's present attempt: its session, or the score of one that had ended when it was stored."""

    session: Session | None
    attempt_index: int
    revision: int = 0
    score: Score | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


class CheckpointParticipant:
    """The desktops of a resources server. Use as a context manager, which closes them."""

    def __init__(self, name: str, settings: SessionSettings) -> None:
        """Prepare; opens nothing. `name` is that of the server in NeMo Gym's configuration."""
        self._name = name
        self._settings = settings
        self._bound: dict[str, _Bound] = {}
        self._phase: _Phase = "idle"
        self._checkpoint_id = ""
        self._accepting = asyncio.Event()
        self._accepting.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        bound, self._bound = self._bound, {}
        await asyncio.gather(*(each.close() for each in bound.values()))

    # Sessions

    async def open(self, rollout_id: str, attempt_index: int, task: str) -> Session:
        """Open a rollout's session, in place of that of an earlier attempt.

        Raises:
            ProtocolError: This attempt or a later one has a session.
            EnvError: It could not be opened.
        """
        await self._accepting.wait()
        self._earlier(rollout_id, attempt_index)
        session = await open_session(task, settings=self._settings)
        try:
            # A checkpoint may have begun, and another call may have opened this attempt.
            await self._accepting.wait()
            earlier = self._earlier(rollout_id, attempt_index)
        except BaseException:
            await session.close()
            raise
        self._bound[rollout_id] = _Bound(session, attempt_index)
        if earlier is not None:
            await earlier.close()
        return session

    def _earlier(self, rollout_id: str, attempt_index: int) -> _Bound | None:
        known = self._bound.get(rollout_id)
        if known is not None and known.attempt_index >= attempt_index:
            raise ProtocolError(f"rollout {rollout_id}: attempt {known.attempt_index} has a session")
        return known

    @asynccontextmanager
    async def acting(self, rollout_id: str, attempt_index: int) -> AsyncIterator[Session]:
        """Change a session's state, alone, never during a checkpoint. Raises: ProtocolError: no session, or stale."""
        async with self._turn(rollout_id, attempt_index) as bound:
            if bound.session is None:
                raise ProtocolError(f"rollout {rollout_id}: its agent has ended it")
            yield bound.session
            bound.revision += 1

    async def score(self, rollout_id: str, attempt_index: int) -> Score:
        """Score a session, and end it. Raises: ProtocolError, EnvError."""
        async with self._turn(rollout_id, attempt_index) as bound:
            return bound.score or await bound.session.score()  # type: ignore[union-attr]  # it has one of them

    @asynccontextmanager
    async def _turn(self, rollout_id: str, attempt_index: int) -> AsyncIterator[_Bound]:
        while True:
            await self._accepting.wait()
            bound = self._bound.get(rollout_id)
            if bound is None or bound.attempt_index != attempt_index:
                raise ProtocolError(f"rollout {rollout_id}: attempt {attempt_index} has no session, or no longer")
            async with bound.turn:
                if self._accepting.is_set() and self._bound.get(rollout_id) is bound:
                    yield bound
                    return

    async def retire(self, rollout_id: str, attempt_index: int) -> None:
        """Close a session; does nothing to that of another attempt, or a second time."""
        bound = self._bound.get(rollout_id)
        if bound is not None and bound.attempt_index == attempt_index:
            del self._bound[rollout_id]
            await bound.close()

    # Control

    def capabilities(self) -> dict[str, Any]:
        """Return what the server can do, and its phase."""
        return {
            "component": "resources_servers",
            "name": self._name,
            "schema_version": 1,
            "admission_states": ["accepting", "paused"],
            "checkpoint_mode": "export_restore",
            "concurrency_contract": "serialized_per_session",
            "multi_process": {"mode": "single_worker", "num_workers": 1},
            "phase": self._phase,
            "active_checkpoint_id": self._checkpoint_id or None,
        }

    async def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Let running steps end, and accept no more. Raises: ProtocolError, TimeoutError: reopened."""
        control = self._activate(body, "idle", "prepared")
        if self._phase == "idle":
            self._phase, self._checkpoint_id = "preparing", control.checkpoint_id
            self._accepting.clear()
            try:
                async with asyncio.timeout(control.deadline_ts - time.time()):
                    for bound in list(self._bound.values()):
                        async with bound.turn:
                            pass
            except BaseException:
                self._reopen()
                raise
            self._phase = "prepared"
        inventory = [
            {
                "rollout_id": rollout_id,
                "attempt_index": each.attempt_index,
                "revision": each.revision,
                "mutation_receipts": 0,
            }
            for rollout_id, each in sorted(self._bound.items())
        ]
        return {"sessions": len(inventory), "state": "prepared", "inventory": inventory}

    async def commit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Store each session's checkpoint or final score in a manifest. Raises: ProtocolError, EnvError, OSError."""
        control = self._activate(body, "prepared", "committed_paused")
        executions = []
        for rollout_id, each in sorted(self._bound.items()):
            kept: dict[str, Any] = {"score": each.score}
            if each.session is not None and each.session.done:
                kept = {"score": await each.session.score()}
            elif each.session is not None:
                kept = {"checkpoint": await each.session.checkpoint(control.checkpoint_id)}
            executions.append(
                _Execution(rollout_id=rollout_id, attempt_index=each.attempt_index, revision=each.revision, **kept)
            )
        manifest = _Manifest(
            schema_version=1, checkpoint_id=control.checkpoint_id, participant=self._name, executions=tuple(executions)
        )
        data = manifest.model_dump_json().encode()
        path = self._manifest_of(control)
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(write_atomically, path, data)
        self._phase = "committed_paused"
        return {"sessions": len(executions), "manifest_digest": hashlib.sha256(data).hexdigest()}

    async def restore(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Open the sessions of a manifest as the next attempts of their rollouts, all or none, and stay paused.

        Raises:
            ProtocolError: The manifest cannot be read, or is of another server.
            EnvError: A checkpoint cannot be opened.
        """
        control = self._activate(body, "idle", "restore_failed_paused")
        self._phase, self._checkpoint_id = "restoring", control.checkpoint_id
        self._accepting.clear()
        opened: dict[str, _Bound] = {}
        try:
            manifest = await asyncio.to_thread(self._read, self._manifest_of(control))
            for each in manifest.executions:
                session = await open_session(each.checkpoint, settings=self._settings) if each.checkpoint else None
                opened[each.rollout_id] = _Bound(session, each.attempt_index + 1, each.revision, each.score)
        except BaseException:
            self._phase = "restore_failed_paused"
            await asyncio.gather(*(each.close() for each in opened.values()))
            raise
        replaced = [self._bound.pop(rollout_id) for rollout_id in opened if rollout_id in self._bound]
        self._bound |= opened
        await asyncio.gather(*(each.close() for each in replaced))
        self._phase = "restored_paused"
        return {"sessions": len(opened), "source_checkpoint_id": manifest.checkpoint_id}

    async def resume(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Accept steps again, after a commit, a restore or an aborted checkpoint. Raises: ProtocolError."""
        if self._phase != "idle":
            self._activate(body, self._phase)
        self._reopen()
        return {"state": "accepting"}

    def _activate(self, body: Mapping[str, Any], *phases: _Phase) -> _Control:
        try:
            control = _Control.model_validate(dict(body))
        except ValidationError as error:
            raise ProtocolError(f"malformed request: {error}") from error
        if self._phase not in phases or self._checkpoint_id not in ("", control.checkpoint_id):
            raise ProtocolError(
                f"checkpoint {control.checkpoint_id}: the server is {self._phase} {self._checkpoint_id}".rstrip()
            )
        return control

    def _reopen(self) -> None:
        self._phase, self._checkpoint_id = "idle", ""
        self._accepting.set()

    def _manifest_of(self, control: _Control) -> Path:
        return Path(control.checkpoint_dir) / "resources" / self._name / "manifest.json"

    def _read(self, path: Path) -> _Manifest:
        try:
            manifest = _Manifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ProtocolError(f"{path}: cannot be read: {error}") from error
        if manifest.participant != self._name:
            raise ProtocolError(f"{path} is of the server {manifest.participant}")
        return manifest
