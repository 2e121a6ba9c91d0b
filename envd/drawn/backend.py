"""Drawn desktops in the registry of backends."""

from collections.abc import Iterable
from pathlib import Path

from envd.base.config import Config
from envd.hypervisor.backends import Backend
from envd.hypervisor.machine import Capabilities, DiskImage, Hypervisor

CAPABILITIES = Capabilities(
    runs_guests=False,
    stand_in_image=DiskImage(name="fake", digest="fake", disk=Path("/dev/null"), disk_format="raw"),
    task_suite="fake",
)


async def _open(config: Config, images: Iterable[DiskImage]) -> Hypervisor:  # noqa: ARG001
    from envd.drawn.hypervisor import FakeHypervisor  # noqa: PLC0415

    return FakeHypervisor(reaction_s=config.hypervisor.reaction_ms / 1000)


BACKEND = Backend(capabilities=CAPABILITIES, open=_open, uris="fake", supports=lambda uri: uri == "fake")
