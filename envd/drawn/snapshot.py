"""Snapshots of drawn desktops: templates and captures, in memory."""

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from envd.drawn.state import DrawnState
from envd.hypervisor.machine import CaptureReport, MachineSpec

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenGuest:
    """State of a paused guest, with its digests."""

    state: DrawnState
    spec: MachineSpec
    digest: str
    disk_digest: str
    size_bytes: int
    """Bytes that it shares with no other guest."""
    notes: Mapping[str, str]

    @classmethod
    def of(cls, state: DrawnState, spec: MachineSpec, *, own_bytes: int, notes: Mapping[str, str]) -> "FrozenGuest":
        disk_digest = _joined(spec.image.digest, state.disk_digest())
        return cls(
            state=state,
            spec=spec,
            digest=_joined(repr(template_key(spec)), disk_digest, state.digest()),
            disk_digest=disk_digest,
            size_bytes=own_bytes,
            notes=dict(notes),
        )


def _joined(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def template_key(spec: MachineSpec) -> MachineSpec:
    """Return the key of a template for such machines: the spec without its id."""
    return replace(spec, machine_id="")


class FakeSnapshot:
    """Implements `envd.hypervisor.machine.Snapshot`.

    As on a real host, it exists until it is discarded and no machine or capture depends on it.
    """

    def __init__(
        self, frozen: FrozenGuest, *, spec: MachineSpec, report: CaptureReport, parent: "FakeSnapshot | None"
    ) -> None:
        """Create a capture that depends on `parent`; without a parent, a stored template, which `discard` keeps."""
        self.frozen = frozen
        """The state; deleted when the snapshot is removed."""
        self.name = f"{spec.machine_id}-{next(_numbers)}"
        """Name on the host."""
        self.is_discarded = False
        self.holder_count = 0
        """Machines and captures that depend on it."""
        self.spec = spec
        self.report = report
        self.digest = frozen.digest
        """Digest of pixels, windows, files and settings."""
        self.disk_digest = frozen.disk_digest
        """Digest of the files."""
        self.notes = frozen.notes
        """Notes given to `Hypervisor.freeze`."""
        self.parent = parent
        """Snapshot that it depends on; None for a template and once it is removed."""
        self.on_gone: Callable[[FakeSnapshot], None] = lambda _: None
        """Called when it is removed."""
        if parent is not None:
            parent.acquire()

    def __repr__(self) -> str:
        kind = "template" if self.parent is None else "capture"
        return f"<FakeSnapshot {kind} {self.digest[:12]} of {self.spec.machine_id!r} | {self.holder_count} holders>"

    @property
    def template_digest(self) -> str:
        """Digest of the template that it descends from."""
        return self.template.digest

    @property
    def template(self) -> "FakeSnapshot":
        """The template that it descends from, or itself."""
        return self if self.parent is None else self.parent.template

    def acquire(self) -> None:
        self.holder_count += 1

    def release(self) -> None:
        self.holder_count -= 1
        self._remove_if_unused()

    async def discard(self) -> None:
        """Allow no more forks of it. Idempotent. A stored template stays on the host."""
        self.is_discarded = True
        self._remove_if_unused()

    def _remove_if_unused(self) -> None:
        if self.is_discarded and not self.holder_count and self.parent is not None:
            parent, self.parent = self.parent, None
            del self.frozen  # frees the pixels, even while a caller keeps this object
            self.on_gone(self)
            parent.release()
