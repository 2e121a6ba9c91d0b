"""Registers the verb, the checker and the format of OSWorld's tasks."""

from collections.abc import Mapping

from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.tasks import OsworldEvaluator, OsworldSetup
from envd.tasks.systems import TaskSystem


def _read(content: Mapping[str, object], os: GuestOs | None) -> dict[str, object]:
    # The format makes entries, whose tasks have the checkers of all systems.
    from envd.integrations.osworld.format import read_osworld  # noqa: PLC0415

    return read_osworld(content, os=os)


SYSTEM = TaskSystem(verb=OsworldSetup, checker=OsworldEvaluator, read_task=_read)
