"""Demonstrations and preferences as Parquet, in the form that `datasets` and TRL read, with images as bytes.

A demonstration is a conversation: `messages`, `images`, `task_id`, `reward`. A preference is a state in which two
episodes of one task first replied differently, and one succeeded: `prompt`, `chosen`, `rejected`, `images`, `task_id`,
and both rewards. Messages consist of parts of type `text` or `image`, in the order of `images`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from trainer.data.transcripts import transcript_of
from trainer.replay.trajectory import IMAGE_PLACEHOLDER, StoredTrajectory, image_bytes

Features = Mapping[str, Any]
_TEXT: Final = {"dtype": "string", "_type": "Value"}
_NUMBER: Final = {"dtype": "float64", "_type": "Value"}
_MESSAGES: Final = [{"role": _TEXT, "content": [{"type": _TEXT, "text": _TEXT}]}]
_IMAGES: Final = [{"_type": "Image"}]
#: Columns by their features, as `datasets` stores them in a file.
DEMONSTRATION: Final[Features] = {"messages": _MESSAGES, "images": _IMAGES, "task_id": _TEXT, "reward": _NUMBER}
PREFERENCE: Final[Features] = {
    **dict.fromkeys(("prompt", "chosen", "rejected"), _MESSAGES),
    "images": _IMAGES,
    "task_id": _TEXT,
    **dict.fromkeys(("chosen_reward", "rejected_reward"), _NUMBER),
}


def demonstration(trajectory: StoredTrajectory) -> dict[str, Any]:
    """Return a trajectory as a row. Raises: InputError: Images and placeholders do not match."""
    transcript = transcript_of(trajectory)
    return {
        "messages": _messages(transcript.messages),
        "images": _images(transcript.images),
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
    }


def preferences(trajectories: Sequence[StoredTrajectory], *, success_at: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each failure that shares a state with a success of its task: the latest such state.

    Episodes of one state, as groups and forks have them, agree in text and pixels until their replies differ.
    """
    successes: dict[str, list[tuple[float, StoredTrajectory]]] = defaultdict(list)
    failures: dict[str, list[tuple[float, StoredTrajectory]]] = defaultdict(list)
    for trajectory in sorted(trajectories, key=lambda each: (each.task_id, each.digest)):
        side = successes if trajectory.reward >= success_at else failures
        side[trajectory.task_id].append((trajectory.reward, transcript_of(trajectory)))
    for task_id, failed in failures.items():
        for rejected_reward, bad in failed:
            pairs = [(_shared_count(good, bad), reward, good) for reward, good in successes[task_id]]
            count, chosen_reward, good = max(pairs, key=lambda pair: pair[0], default=(0, 0.0, bad))
            if count:
                prompt = bad.messages[:count]
                yield {
                    "prompt": _messages(prompt),
                    "chosen": _messages([good.messages[count]]),
                    "rejected": _messages([bad.messages[count]]),
                    "images": _images(bad.images[: sum(each["content"].count(IMAGE_PLACEHOLDER) for each in prompt)]),
                    "task_id": task_id,
                    "chosen_reward": chosen_reward,
                    "rejected_reward": rejected_reward,
                }


def _shared_count(one: StoredTrajectory, other: StoredTrajectory) -> int:
    """Return how many leading messages are equal before two replies that differ; 0 if no replies follow them."""
    pairs = list(zip(_with_images(one), _with_images(other), strict=False))
    count = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    differ = count < len(pairs) and all(role == "assistant" for role, *_ in pairs[count])
    return count if differ else 0


def _with_images(transcript: StoredTrajectory) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    first = 0
    for message in transcript.messages:
        after = first + message["content"].count(IMAGE_PLACEHOLDER)
        yield message["role"], message["content"], transcript.images[first:after]
        first = after


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": each["role"], "content": list(_parts(each["content"]))} for each in messages]


def _parts(text: str) -> Iterator[dict[str, str | None]]:
    for number, part in enumerate(text.split(IMAGE_PLACEHOLDER)):
        if number:
            yield {"type": "image", "text": None}
        if part:
            yield {"type": "text", "text": part}


def _images(uris: Sequence[str]) -> list[dict[str, bytes | None]]:
    return [{"bytes": image_bytes(uri), "path": None} for uri in uris]
