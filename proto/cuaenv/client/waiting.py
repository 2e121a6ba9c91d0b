"""Log what a host's openings wait for, so that a caller sees why nothing happens yet."""

import asyncio
import logging
from typing import Final

from cuaenv.client.connection import Connection
from cuaenv.client.errors import EnvError
from cuaenv.v1 import env_pb2

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 5.0


async def log_waits(connection: Connection) -> None:
    """Log every 5 s which of a host's pools have no machine to give, and why, until cancelled.

    A pool without machines is a warning, so it is visible without a configuration of logging. Queues are normal.
    """
    while True:
        await asyncio.sleep(_INTERVAL_S)
        try:
            request = env_pb2.ListPoolsRequest(include_queue=True)
            pools = (await connection.attempt("ListPools", request, timeout_s=_INTERVAL_S)).pools
        except EnvError:
            continue  # the opening itself logs and reports what is wrong
        for pool in pools:
            is_empty = not pool.idle_count + pool.leased_count
            reason = wait_reason(pool)
            if reason:
                level = logging.WARNING if is_empty else logging.INFO
                logger.log(level, "waiting for pool %s at %s: %s", pool.name, connection.target, reason)


def wait_reason(pool: env_pb2.Pool) -> str:
    """Return why episodes that a pool should hold wait; empty if none do."""
    if not pool.waiting_count:
        return ""
    problem = f"; {pool.problem}" if pool.problem else ""
    if not pool.idle_count + pool.leased_count:
        return ("starting machines" if pool.template_digest else "preparing the template") + problem
    if pool.queue:
        return pool.queue[0].reason + problem
    return f"{pool.waiting_count} episodes in the queue, {pool.leased_count} of {pool.capacity_count} machines busy"
