"""Values of episodes for tests, each with the fields that matter to the test."""

from datetime import UTC, datetime
from typing import Any

from envd.base.config import SettlePolicy
from envd.episodes.progress import EpisodeOrigin, EpisodeSpec, EpisodeStatus, Progress

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
ORIGIN = EpisodeOrigin(template_digest="t", overlay_parent="o", first_frame_id="f")


def episode_spec(**changes: Any) -> EpisodeSpec:
    fields: dict[str, Any] = {
        "episode_id": "ep-1",
        "group_id": "group-1",
        "task_id": "suite/name",
        "task_digest": "",
        "pool": "desktop",
        "run": "",
        "owner": "",
        "max_steps": 5,
        "settle": SettlePolicy(),
        "origin": ORIGIN,
        "create_time": NOON,
    }
    return EpisodeSpec(**fields | changes)


def episode_info(progress: Progress | None = None, **changes: Any) -> EpisodeStatus:
    return EpisodeStatus(spec=episode_spec(**changes), progress=progress or Progress(), epoch=1, expire_time=NOON)
