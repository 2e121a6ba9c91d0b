"""Our hooks for slime's contract tests, which pass a bare `args` and no model, engine or machines.

Model and engine are doubles; the daemon runs in this process.
"""

from typing import Any
from unittest.mock import patch

from cuaenv.client import Done
from tests.support.server import serve_fake
from tests.support.slime import ScriptedEngine, stand_in_args, stand_in_state
from trainer.agent.grammars import grammar
from trainer.slime import hooks, slime_compat


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run an episode in which the agent is done at once."""
    engine = ScriptedEngine(lambda _: grammar("qwen3-vl").render([Done()]))
    agent = {"max_turns": 2, "prompt_tokens": 8192}
    async with serve_fake(size=1) as server:
        given = vars(stand_in_args({"hosts": [server.address], "agent": agent}, n_samples_per_prompt=1))
        for name, value in given.items():
            if not hasattr(args, name):
                setattr(args, name, value)
        sample.metadata["task_id"] = "fake/save-note"
        with (
            patch.object(slime_compat, "generate_state", lambda _: stand_in_state()),
            patch.object(slime_compat, "other_client", lambda: engine.post),
        ):
            return await hooks.generate(args, sample, {"max_new_tokens": 200, **sampling_params}, evaluation)


def log_rollout(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    """Log, and set the attribute that slime's test checks."""
    args.logged_rollout_id = rollout_id
    return hooks.log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time)


def log_evaluation(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    """Log, and set the attribute that slime's test checks."""
    args.logged_eval_rollout_id = rollout_id
    return hooks.log_evaluation(rollout_id, args, data, extra_metrics)
