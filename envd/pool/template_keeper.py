"""Keep one pool supplied with its template: get it, check that it still exists, replace it if it was removed."""

import logging
from dataclasses import dataclass, field
from typing import Protocol

from envd.base.aio import OwnedTasks
from envd.base.errors import Draining, EnvdError, TemplateCorrupt
from envd.hypervisor.machine import MachineSpec
from envd.pool.backoff import Backoff
from envd.pool.leased import FrozenDesktop
from envd.pool.lifecycle import MachineFactory, MachineRecord, Work, prepared
from envd.pool.template import TemplateBuilder, TemplateCache

logger = logging.getLogger(__name__)


class TemplateUser(TemplateBuilder, Protocol):
    """The pool that uses the template."""

    async def wait_for_room(self) -> None:
        """Return when there is room for the machine that tests the template."""

    def template_changed(self) -> None:
        """There is a template now, or another failure to get one."""

    def template_removed(self) -> None:
        """The template was removed, so its unused forks have to go."""


@dataclass(slots=True, eq=False, kw_only=True)
class TemplateKeeper:
    """The template of one pool."""

    spec: MachineSpec
    factory: MachineFactory
    templates: TemplateCache
    backoff: Backoff
    tasks: OwnedTasks
    check_interval_s: float
    frozen: FrozenDesktop | None = field(default=None, init=False)
    """The template; None while there is none."""
    _user: TemplateUser = field(init=False)

    def start(self, user: TemplateUser) -> None:
        """Start to get the template for its pool, and to check it at each interval."""
        self._user = user
        self.tasks.spawn(self._get(), name=f"pool:{self.spec.machine_id}:template")
        self.tasks.spawn(self._watch(), name=f"pool:{self.spec.machine_id}:watch")

    async def release(self) -> None:
        if self.frozen is not None:
            frozen, self.frozen = self.frozen, None
            await self.templates.release(frozen)

    def prepare(self, frozen: FrozenDesktop) -> Work:
        """Create a machine for a fork of the template; see `prepared`."""
        create = prepared(frozen, factory=self.factory)

        async def work(record: MachineRecord) -> None:
            try:
                await create(record)
            except TemplateCorrupt:
                await self.check()
                raise

        return work

    async def check(self) -> None:
        """If the template was removed, get another one, and retire its unused forks."""
        frozen = self.frozen
        if frozen is None:
            return
        try:
            await self.factory.hypervisor.check_intact(frozen.snapshot)
        except TemplateCorrupt as error:
            if frozen is not self.frozen:
                return
            logger.error("pool %s: %s; creating another one", self.spec.machine_id, error)  # noqa: TRY400 -- complete as it is
            self.frozen = None
            self.backoff.failed(self.factory.clock.monotonic(), f"{error}; creating another one")
            self.templates.evict(frozen)
            self.tasks.spawn(self.templates.release(frozen), name=f"pool:{self.spec.machine_id}:release template")
            self.tasks.spawn(self._get(), name=f"pool:{self.spec.machine_id}:template")
            self._user.template_removed()

    async def _get(self) -> None:
        """Get the template, with retries, whenever there is room for the machine that tests it."""
        while self.frozen is None:
            try:
                await self._user.wait_for_room()
                self.frozen = await self.templates.acquire(self.spec, builder=self._user)
            except Draining:
                return
            except Exception as error:  # any error may be gone at the next attempt
                now_s = self.factory.clock.monotonic()
                self.backoff.failed(now_s, f"template not built: {error}")
                self._user.template_changed()
                unexpected = None if isinstance(error, EnvdError) else error
                logger.warning("pool %s: template not built: %s", self.spec.machine_id, error, exc_info=unexpected)
                await self.factory.clock.sleep((self.backoff.retry_at_s(now_s) or now_s) - now_s)
        self.backoff.succeeded()
        self._user.template_changed()

    async def _watch(self) -> None:
        while True:
            await self.factory.clock.sleep(self.check_interval_s)
            await self.check()
