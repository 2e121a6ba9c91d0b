"""`SightWorkflow` on AReaL's own classes and a small model, with planted faults."""

from typing import Any

import pytest

from tests.support.sight import AGENT, FAULTS, SETTINGS, Fault, check, examine, picture_of, plant, reply
from trainer.sight.model import SightModel

pytestmark = [pytest.mark.areal, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SightModel:
    from trainer.learn.sight import tiny_model

    return SightModel(tiny_model(tmp_path_factory.mktemp("model") / "tiny", SETTINGS))


class Engine:
    """AReaL's engine, with a model in this process."""

    def __init__(self, model: SightModel, fault: Fault) -> None:
        self._model, self._fault = model, fault
        self.is_greedy = True

    async def agenerate(self, request: Any) -> Any:
        from areal.api import ModelResponse

        self.is_greedy &= request.gconfig.greedy
        images = [picture_of(each) for each in request.image_data]
        limit = request.gconfig.max_new_tokens
        ids, log_probs = reply(self._model, self._fault, request.input_ids, images, limit=limit)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=ids,
            output_logprobs=log_probs,
            output_versions=[0] * len(ids),
            stop_reason="stop" if ids[-1] == self._model.tokenizer.eos_token_id else "length",
        )


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_planted_faults_are_found(fault: Fault, model: SightModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal.api.cli_args import GenerationHyperparameters

    from tests.areal.areal_sight import SightWorkflow

    plant(fault, monkeypatch)
    workflow = SightWorkflow(
        gconfig=GenerationHyperparameters(n_samples=1, temperature=1.0),
        tokenizer=model.tokenizer,
        processor=model.processor,
        envd={"hosts": ["127.0.0.1:1"], "agent": AGENT, "group_size": 4},
    )
    engine = Engine(model, fault)
    episodes = await workflow.episodes(engine)
    report = examine(workflow.plan, episodes, model, fault)
    check(report, fault)
    assert engine.is_greedy
