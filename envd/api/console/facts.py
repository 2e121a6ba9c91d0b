"""What the console shows of episodes and pools, as JSON objects. Pure.

Texts of clients and guests are passed on as they are: the page must treat every string as text, never as HTML.
"""

from collections.abc import Iterable
from typing import Any

from envd.base.clock import Clock
from envd.base.errors import EvaluatorFailed
from envd.episodes.episode import Episode
from envd.episodes.events import PerformedStep
from envd.episodes.types import EvaluateResult
from envd.pool.queue_report import QueuedGroup
from envd.pool.status import PoolStatus

Facts = dict[str, Any]


def episode_facts(episode: Episode, *, last_action: str, clock: Clock) -> Facts:
    """Return what a tile shows."""
    info = episode.info(clock)
    return {
        "id": info.episode_id,
        "group": info.group_id,
        "parent": info.parent_episode_id,
        "task": info.task_id,
        "pool": info.pool,
        "run": info.run,
        "owner": info.owner,
        "state": info.state.value,
        "reason": info.end_reason,
        "step": info.step_count,
        "max_steps": info.max_steps,
        "created": round(info.create_time.timestamp()),
        # Whole seconds: the exact value differs with every reading.
        "expires": round(info.expire_time.timestamp()),
        "lease_s": episode.lease.ttl_s,
        "in_call": episode.lease.in_call,
        "action": last_action,
        "score": episode.verdict.score if isinstance(episode.verdict, EvaluateResult) else None,
    }


def episode_detail(episode: Episode, facts: Facts, steps: Iterable[PerformedStep]) -> Facts:
    """Return what the full view shows."""
    verdict = episode.verdict
    return {
        **facts,
        "instruction": episode.task.instruction,
        "machine": episode.machine.machine_id,
        "cause": episode.cause,
        "checks": [
            {"name": check.name, "score": check.score, "evidence": check.evidence}
            for check in (verdict.checks if isinstance(verdict, EvaluateResult) else ())
        ],
        "evaluator_error": str(verdict) if isinstance(verdict, EvaluatorFailed) else "",
        "steps": [step_facts(step) for step in steps],
    }


def step_facts(step: PerformedStep) -> Facts:
    """Return a line of the timeline."""
    return {
        "index": step.index,
        "time": step.time.timestamp(),
        "actions": list(step.actions),
        "settled": step.is_settled,
        "ms": round(step.total_ms),
    }


def pool_facts(pool: PoolStatus, queue: Iterable[QueuedGroup], *, now_s: float) -> Facts:
    """Return what the page shows of a pool and its queue, at a Unix time."""
    return {
        "name": pool.name,
        "image": pool.image,
        "accelerator": pool.accelerator,
        "capacity": pool.capacity,
        "leased": pool.leased_count,
        "idle": pool.idle_count,
        "starting": pool.starting_count,
        "dying": pool.dying_count,
        "reserved": pool.reserved_count,
        "waiting": pool.waiting_count,
        "held_by_run": dict(pool.held_by_run),
        "healthy": pool.healthy,
        "problem": pool.problem,
        "queue": [
            {
                "run": group.run,
                "owner": group.owner,
                "machines": group.machine_count,
                "since": round(now_s - group.waited_s),
                "why": group.reason,
            }
            for group in queue
        ],
    }
