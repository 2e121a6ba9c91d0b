"""Keep one pool supplied with its template: get it, check that it still exists, replace it if it was removed."""

import logging
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


class TemplateKeeper:
    """The template of one pool."""

    def __init__(
        self,
        spec: MachineSpec,
        *,
        factory: MachineFactory,
        templates: TemplateCache,
        backoff: Backoff,
        tasks: OwnedTasks,
        check_interval_s: float,
    ) -> None:
        self.frozen: FrozenDesktop | None = None
        """The template; None while there is none."""
        self._name = spec.machine_id
        self._spec = spec
        self._user: TemplateUser
        self._factory = factory
        self._templates = templates
        self._backoff = backoff
        self._clock = factory.clock
        self._tasks = tasks
        self._check_interval_s = check_interval_s

    def start(self, user: TemplateUser) -> None:
        """Start to get the template for its pool, and to check it at each interval."""
        self._user = user
        self._tasks.spawn(self._get(), name=f"pool:{self._name}:template")
        self._tasks.spawn(self._watch(), name=f"pool:{self._name}:watch")

    async def release(self) -> None:
        """Release the template, if there is one."""
        if self.frozen is not None:
            frozen, self.frozen = self.frozen, None
            await self._templates.release(frozen)

    def prepare(self, frozen: FrozenDesktop) -> Work:
        """Create a machine for a fork of the template; see `prepared`."""
        create = prepared(frozen, factory=self._factory)

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
            await self._factory.hypervisor.check_intact(frozen.snapshot)
        except TemplateCorrupt as error:
            if frozen is not self.frozen:
                return
            logger.error("pool %s: %s; creating another one", self._name, error)  # noqa: TRY400 -- complete as it is
            self.frozen = None
            self._backoff.failed(self._clock.monotonic(), f"{error}; creating another one")
            self._templates.evict(frozen)
            self._tasks.spawn(self._templates.release(frozen), name=f"pool:{self._name}:release template")
            self._tasks.spawn(self._get(), name=f"pool:{self._name}:template")
            self._user.template_removed()

    async def _get(self) -> None:
        """Get the template, with retries, whenever there is room for the machine that tests it."""
        while self.frozen is None:
            await self._user.wait_for_room()
            try:
                self.frozen = await self._templates.acquire(self._spec, builder=self._user)
            except Draining:
                return
            except Exception as error:  # any error may be gone at the next attempt
                now_s = self._clock.monotonic()
                self._backoff.failed(now_s, f"template not built: {error}")
                self._user.template_changed()
                unexpected = None if isinstance(error, EnvdError) else error
                logger.warning("pool %s: template not built: %s", self._name, error, exc_info=unexpected)
                await self._clock.sleep((self._backoff.retry_at_s(now_s) or now_s) - now_s)
        self._backoff.succeeded()
        self._user.template_changed()

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(self._check_interval_s)
            await self.check()
