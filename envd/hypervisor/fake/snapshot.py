"""A frozen fake machine, and who still stands on it."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from envd.hypervisor.fake.digest import content_digest
from envd.hypervisor.fake.guest import Guest
from envd.hypervisor.machine import CaptureReport, MachineSpec

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenGuest:
    """A guest that never runs again, only copies of it do."""

    guest: Guest
    spec: MachineSpec
    digest: str
    disk_digest: str
    size_bytes: int
    """What it has for itself."""
    notes: Mapping[str, str]

    @classmethod
    def of(cls, guest: Guest, spec: MachineSpec, *, own_bytes: int, notes: Mapping[str, str]) -> "FrozenGuest":
        """Freeze a copy of a guest that stands still."""
        still = guest.copy()
        disk_digest = content_digest(spec.image.digest, still.files)
        return cls(
            guest=still,
            spec=spec,
            digest=content_digest(repr(template_key(spec)), disk_digest, still),
            disk_digest=disk_digest,
            size_bytes=own_bytes,
            notes=dict(notes),
        )


def template_key(spec: MachineSpec) -> MachineSpec:
    """Return what a template for such machines is stored under: the spec but for its id."""
    return replace(spec, machine_id="")


class FakeSnapshot:
    """Implements `envd.hypervisor.machine.Snapshot`.

    As on a real host it is there until it was discarded and nothing stands on it: machines, and captures of those.
    """

    def __init__(
        self,
        frozen: FrozenGuest,
        *,
        spec: MachineSpec,
        report: CaptureReport,
        parent: "FakeSnapshot | None",
        on_gone: "Callable[[FakeSnapshot], None]",
    ) -> None:
        """Stand on `parent` if there is one; without, it is a stored template and outlives its discarding."""
        self.frozen = frozen
        self.name = f"{spec.machine_id}-{next(_numbers)}"
        """Names it in the books."""
        self.is_discarded = False
        self.holder_count = 0
        """Machines and captures that stand on it."""
        self._spec = spec
        self._report = report
        self._parent = parent
        self._on_gone = on_gone
        if parent is not None:
            parent.hold()

    def __repr__(self) -> str:
        kind = "template" if self._parent is None else "capture"
        return f"<FakeSnapshot {kind} {self.digest[:12]} of {self._spec.machine_id!r} | {self.holder_count} holders>"

    @property
    def digest(self) -> str:
        """Identifies pixels, windows, files and settings; equal states have equal digests."""
        return self.frozen.digest

    @property
    def disk_digest(self) -> str:
        """Identifies the files."""
        return self.frozen.disk_digest

    @property
    def spec(self) -> MachineSpec:
        """What the frozen machine was made from."""
        return self._spec

    @property
    def size_bytes(self) -> int:
        """What it occupies beyond what it was forked from."""
        return self.frozen.size_bytes

    @property
    def parent(self) -> "FakeSnapshot | None":
        """What it stands on; None for a template, and when it is gone."""
        return self._parent

    @property
    def report(self) -> CaptureReport:
        """What freezing took."""
        return self._report

    @property
    def notes(self) -> Mapping[str, str]:
        """What the one who froze it wrote down."""
        return self.frozen.notes

    def hold(self) -> None:
        """Stand on it."""
        self.holder_count += 1

    def let_go(self) -> None:
        """Undo one `hold`."""
        self.holder_count -= 1
        self._clear()

    async def discard(self) -> None:
        """Give it up; nothing more is forked from it. Idempotent. A stored template stays on the host."""
        self.is_discarded = True
        self._clear()

    def _clear(self) -> None:
        if self.is_discarded and not self.holder_count and self._parent is not None:
            parent, self._parent = self._parent, None
            self._on_gone(self)
            self.frozen.guest.release()
            parent.let_go()
