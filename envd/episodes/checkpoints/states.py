"""Write the frozen state of a machine to a store of checkpoints, and read it back to fork machines from it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final

from envd.base.aio import shielded
from envd.base.clock import Clock, wait_until
from envd.base.errors import CheckpointUnusable, HypervisorError
from envd.episodes.checkpoints.manifest import Manifest
from envd.episodes.checkpoints.store import CheckpointStore, Draft, in_thread, store_error
from envd.episodes.checkpoints.views import read_view, write_view
from envd.episodes.progress import EpisodeSpec, Progress
from envd.pool.leased import FrozenDesktop
from envd.pool.pool import MachinePool

#: How long a state waits for its pool's template.
_TEMPLATE_S: Final = 30.0


def describe_state(
    spec: EpisodeSpec,
    progress: Progress,
    frozen: FrozenDesktop,
    *,
    epoch: int = 1,
    checkpoint_id: str,
    create_time: datetime,
    ttl: timedelta,
    pinned: bool,
    label: str = "",
    fingerprint: str = "",
) -> Manifest:
    """Return the description of the frozen state of an episode."""
    return Manifest(
        checkpoint_id=checkpoint_id,
        label=label,
        spec=spec,
        progress=progress,
        epoch=epoch,
        template_digest=frozen.snapshot.template_digest,
        frame_id=frozen.view.frame.frame_id,
        create_time=create_time,
        expire_time=create_time + ttl,
        pinned=pinned,
        fingerprint=fingerprint,
    )


async def write_state(
    described: Manifest, frozen: FrozenDesktop, pool: MachinePool, store: CheckpointStore, *, shares_files: bool = False
) -> Manifest:
    """Store a frozen state under a description, and return that with its files. On failure nothing is stored.

    `shares_files` as for `Hypervisor.save`.

    Raises:
        CheckpointStoreFull, StoreError, HypervisorError: It could not be written.
    """
    async with draft_of(described, store) as draft:
        await in_thread(write_view, frozen.view, draft.directory)
        await pool.hypervisor.save(frozen.snapshot, draft.directory, shares_files=shares_files)
        return await in_thread(store.complete, draft, described)


@asynccontextmanager
async def draft_of(described: Manifest, store: CheckpointStore) -> AsyncIterator[Draft]:
    """Yield a checkpoint to write and complete. On failure it is abandoned."""
    begin = in_thread(store.begin, described)
    draft = await shielded(begin, undo=lambda draft: in_thread(store.abandon, draft))
    try:
        yield draft
    except BaseException as error:
        await in_thread(store.abandon, draft)
        if isinstance(error, OSError):
            raise store_error(described.checkpoint_id, error) from error
        raise


async def read_state(
    checkpoint: Manifest, pool: MachinePool, store: CheckpointStore, *, clock: Clock, shares_files: bool = False
) -> FrozenDesktop:
    """Return a stored state; discard its snapshot after the last fork. `shares_files` as for `Hypervisor.restore`.

    Raises:
        CheckpointNotFound, CheckpointCorrupt: It was deleted, or is damaged.
        CheckpointUnusable: The pool has another template, or none for 30 s, as after the start of the daemon.
        HypervisorError: It could not be read.
    """
    deadline_s = clock.monotonic() + _TEMPLATE_S
    while (template := pool.template) is None:
        if clock.monotonic() >= deadline_s:
            raise CheckpointUnusable(f"checkpoint {checkpoint.checkpoint_id}: pool {pool.name} has no template now")
        await wait_until(clock, deadline_s, or_event=pool.changes.next)
    require_template(checkpoint, template)
    path = store.path(checkpoint.checkpoint_id)
    try:
        with store.hold(checkpoint):
            await in_thread(store.verify, checkpoint)
            view = await in_thread(read_view, path, checkpoint.checkpoint_id)
            snapshot = await pool.hypervisor.restore(template.snapshot, path, shares_files=shares_files)
            return FrozenDesktop(snapshot=snapshot, view=view)
    except HypervisorError:
        # One that is deleted while it is read looks damaged.
        await in_thread(store.find, checkpoint.checkpoint_id)
        raise


def require_template(checkpoint: Manifest, template: FrozenDesktop) -> None:
    """Raises: CheckpointUnusable: The checkpoint builds on another template."""
    if template.snapshot.template_digest != checkpoint.template_digest:
        raise CheckpointUnusable(
            f"checkpoint {checkpoint.checkpoint_id}: pool {checkpoint.spec.pool} has another template now (image,"
            " machine size, QEMU or processor changed); use a host that has the old one, or start over"
        )
