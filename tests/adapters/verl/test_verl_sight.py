"""`SightAgentLoop` on verl's own agent-loop worker and queue, and a small model, with planted faults."""

from pathlib import Path
from typing import Any

import pytest
from verl.workers.rollout.replica import TokenOutput

from tests.adapters.verl import test_verl
from tests.adapters.verl.test_verl import Rollout, queue  # noqa: F401 -- a fixture
from tests.adapters.verl.verl_sight import turns_of
from tests.support.sight import AGENT, FAULTS, SETTINGS, Fault, check, examine, plant, reply
from trainer.sight.episode import plan_of
from trainer.sight.model import SightModel

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def eyes(model: Path) -> SightModel:
    return SightModel(model)


class Engine:
    """verl's engine, with a model in this process."""

    def __init__(self, model: SightModel, fault: Fault) -> None:
        self.tokenizer: Any = None
        self.temperatures = set[float]()
        self._model, self._fault = model, fault

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: list[Any] | None = None, **_: Any
    ) -> TokenOutput:
        self.temperatures.add(sampling_params["temperature"])
        limit = sampling_params["max_tokens"]
        ids, log_probs = reply(self._model, self._fault, prompt_ids, image_data or [], limit=limit)
        reason = "completed" if ids[-1] == self._model.tokenizer.eos_token_id else "length"
        return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason=reason, extra_fields={"global_steps": 0})


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_planted_faults_are_found(
    fault: Fault, eyes: SightModel, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fault, monkeypatch)
    monkeypatch.setattr(test_verl, "TARGET", "tests.adapters.verl.verl_sight.SightAgentLoop")
    engine = Engine(eyes, fault)
    rollout = Rollout("127.0.0.1:1", model, tmp_path, engine, agent=AGENT)  # type: ignore[arg-type]
    plan, episodes = plan_of(SETTINGS), []
    for number in range(len(plan.episodes)):
        await rollout.start(f"sight-{number}", count=1, task_id=f"sight/{number}")
        status, rows = await rollout.finish(f"sight-{number}")
        assert status == "finished"
        episodes += [turns_of(row, rollout.worker.processor) for row in rows.values()]
    report = examine(plan, episodes, eyes, fault)
    check(report, fault)
    assert engine.temperatures == {0.0}
