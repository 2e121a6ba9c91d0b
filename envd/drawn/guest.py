"""State of a fake guest: screen, windows, files, programs, agent and clock; and its snapshots.

It is one object so that one deep copy forks all of it. The copy shares unchanged pixels and files with the original.
"""

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from envd.drawn.desktop.canvas import Framebuffer, Picture, Rect
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.files import GuestFiles
from envd.drawn.programs import GuestClock, Programs
from envd.drawn.wires.agent import GuestAgent
from envd.hypervisor.machine import CaptureReport, MachineSpec


class Guest:
    """One guest. It boots, with a black screen, until `show_desktop`."""

    def __init__(self, *, width_px: int, height_px: int) -> None:
        self.clock = GuestClock()
        self.files = GuestFiles()
        self.programs = Programs(
            self.files, windows=self._window_manager, clock=self.clock, power_off=self._powered_off
        )
        self.agent = GuestAgent(self.files, self.programs, clock=self.clock)
        self.desktop: DrawnDesktop | None = None
        self.framebuffer = Framebuffer(
            # Not written during boot, so the kernel backs it with one zero page.
            np.zeros((height_px, width_px, 4), np.uint8),
            shared=True,
        )
        self.on_change: Callable[[list[Rect]], None] = _ignore
        """Called with the changed rectangles of the screen. A copy starts without a callback."""
        self.on_end: Callable[[str], None] = _ignore
        """Called when the guest powers off or reboots: POWER_OFF or REBOOT. A copy starts without a callback."""

    def show_desktop(self, start: Picture) -> None:
        """End the boot and start the session. `start` is its first picture, used if it has the screen's size."""
        size = self.framebuffer.bounds
        drawn = (size.w, size.h) == start.size_px
        if drawn:
            self.framebuffer = Framebuffer.on(start)
        self.desktop = DrawnDesktop(
            self.framebuffer, files=self.files, on_change=self._changed, on_end=self._ended, is_drawn=drawn
        )
        self._changed([size])

    def copy(self) -> "Guest":
        """Return a guest in the same state. Pixels and files are shared until one of them writes to them."""
        return copy.deepcopy(self, {id(self.on_change): _ignore, id(self.on_end): _ignore})

    def release(self) -> None:
        """Free its pixels at once.

        The guest is a reference cycle, so they would otherwise wait for a garbage collection.
        """
        self.framebuffer = Framebuffer(np.zeros((0, 0, 4), np.uint8), shared=True)
        if self.desktop:
            self.desktop.framebuffer = self.framebuffer

    # Bound methods, not closures: a deep copy rebinds methods, but a closure keeps the original guest.

    def _changed(self, rects: list[Rect]) -> None:
        self.on_change(rects)

    def _powered_off(self) -> None:
        self._ended("POWER_OFF")

    def _ended(self, cause: str) -> None:
        self.on_end(cause)

    def _window_manager(self) -> DrawnDesktop | None:
        return self.desktop


def _ignore(_event: object) -> None:
    pass


def content_digest(*values: object) -> str:
    """Return the digest (sha256 hex) of plain values, collections and the fake's own objects.

    Clocks and times (every float is one) are left out because they change without the guest; so are callables.
    """
    digester = _Digester()
    for value in values:
        digester.feed(value)
    return digester.hexdigest()


class _Digester:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        # The object graph has cycles: a repeated object is identified by the order of its first visit.
        self._seen: dict[int, int] = {}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def feed(self, value: Any) -> None:
        match value:
            case None | bool() | int() | str():
                self._put(type(value).__name__, repr(value).encode())
            case bytes() | bytearray():
                self._put("bytes", value)
            case list() | tuple():
                self._feed_all("list", value)
            case set() | frozenset():
                self._feed_all("set", sorted(value, key=repr))
            case dict():
                self._feed_all("map", [part for key in sorted(value, key=repr) for part in (key, value[key])])
            case float() | GuestClock():
                pass
            case _ if not callable(value):
                self._feed_object(value)

    def _feed_object(self, value: object) -> None:
        if id(value) in self._seen:
            self._put("seen", str(self._seen[id(value)]).encode())
            return
        self._seen[id(value)] = len(self._seen)
        self._put("object", type(value).__name__.encode())
        match value:
            case Framebuffer():
                self.feed(value.picture().digest)
            case GuestFiles():
                self.feed(dict(value))
                self.feed(value.directories)
                self.feed(value.entropy)
            case _:
                names = [field.name for field in fields(value)] if is_dataclass(value) else sorted(vars(value))
                for name in names:
                    self._put("name", name.encode())
                    self.feed(getattr(value, name))

    def _feed_all(self, kind: str, values: Iterable[object]) -> None:
        values = list(values)
        self._put(kind, str(len(values)).encode())
        for value in values:
            self.feed(value)

    def _put(self, kind: str, data: bytes | bytearray) -> None:
        self._hash.update(f"{kind} {len(data)} ".encode())
        self._hash.update(data)


_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenGuest:
    """A guest that does not run again; only copies of it do."""

    guest: Guest
    spec: MachineSpec
    digest: str
    disk_digest: str
    size_bytes: int
    """Bytes that it shares with no other guest."""
    notes: Mapping[str, str]

    @classmethod
    def of(cls, guest: Guest, spec: MachineSpec, *, own_bytes: int, notes: Mapping[str, str]) -> "FrozenGuest":
        """Freeze a copy of a paused guest."""
        copied = guest.copy()
        disk_digest = content_digest(spec.image.digest, copied.files)
        return cls(
            guest=copied,
            spec=spec,
            digest=content_digest(repr(template_key(spec)), disk_digest, copied),
            disk_digest=disk_digest,
            size_bytes=own_bytes,
            notes=dict(notes),
        )


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
        self.on_gone: Callable[[FakeSnapshot], None] = _ignore
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
            self.on_gone(self)
            self.frozen.guest.release()
            parent.release()
