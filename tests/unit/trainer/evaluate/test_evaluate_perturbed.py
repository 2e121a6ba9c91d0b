"""Attempts in perturbed worlds: which world an attempt gets."""

from typing import Any, cast

import pytest

from cuaenv.client import Perturb, Task, Unreachable
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Conversation
from trainer.cli.evaluate import _candidates
from trainer.cli.run_file import RunConfig
from trainer.evaluate.play import play_attempt


class NoMachines:
    """Environments that refuse every reset."""

    def __init__(self) -> None:
        self.asked: list[Perturb | None] = []

    async def reset(self, task: Any, **options: Any) -> Any:
        self.asked.append(options.get("perturb"))
        raise Unreachable("no daemon")


def task(name: str) -> Task:
    return Task(
        task_id=f"desktop/{name}",
        instruction="Do it.",
        level=1,
        suite="desktop",
        version=1,
        tags=(),
        max_steps=5,
        os="linux",
        domain="",
        split="train",
        variant_count=1,
        runnable=True,
        obstacles=(),
    )


def no_conversation(_seed: int) -> Conversation:
    return cast(Conversation, None)  # never used without a machine


async def worlds(*attempts: tuple[str, int], is_perturbed: bool) -> list[Perturb | None]:
    environments = NoMachines()
    for name, seed in attempts:
        await play_attempt(
            environments, task(name), no_conversation, settings=AgentSettings(), seed=seed, is_perturbed=is_perturbed
        )
    return environments.asked


async def test_an_attempt_has_the_world_of_its_task_and_seed() -> None:
    first, again, other_seed, other_task = [
        (await worlds(attempt, is_perturbed=True))[0] for attempt in (("a", 0), ("a", 0), ("a", 1), ("b", 0))
    ]
    assert first is not None
    assert first == again
    assert len({each.seed for each in (first, other_seed, other_task) if each is not None}) == 3
    assert 0 <= first.seed < 1 << 31


async def test_other_attempts_have_a_clean_world() -> None:
    assert set(await worlds(("a", 0), is_perturbed=False)) == {None}


def test_one_model_is_compared_with_itself() -> None:
    clean, perturbed = _candidates(RunConfig(endpoint="http://127.0.0.1:9/v1", perturb=True))
    assert (clean.label, clean.perturb, perturbed.label, perturbed.perturb) == ("clean", False, "perturbed", True)
    assert clean.endpoint == perturbed.endpoint


@pytest.mark.parametrize("fields", [{}, {"before": "http://x/v1", "after": "http://y/v1"}])
def test_two_models_cannot_be_perturbed(fields: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="--endpoint URL alone"):
        _candidates(RunConfig(**fields, perturb=True))
