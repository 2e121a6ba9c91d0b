"""Serve kept weights as SGLang's `/generate`, for `trainer eval --checkpoint`.

    python -m tests.tools.learning.widgets.serve --config docs/learning/settings/reading.yaml WEIGHTS DIR

Writes what `--checkpoint` names to DIR/model and the agent's settings to DIR/agent.json, prints the address, and serves
until standard input ends, or SIGINT or SIGTERM. WEIGHTS is a directory of packed weights, such as `base/model`.
"""

import argparse
import json
import signal
import sys
from contextlib import suppress
from pathlib import Path

from trainer.learn.checkpoint import unpack_checkpoint
from trainer.learn.engine import PolicyEngine
from trainer.learn.policy import Policy
from trainer.learn.settings import Settings


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, action="append", default=[], help="settings of the run")
    parser.add_argument("weights", type=Path)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    # Killed at once, it would leave its pictures in memory, under /dev/shm.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings().changed(*given.config)
    checkpoint = unpack_checkpoint(given.weights, given.directory / "model")
    (given.directory / "agent.json").write_text(json.dumps(settings.agent_mapping), encoding="utf-8")
    policy = Policy(checkpoint, device=settings.torch_device, image_px=settings.image_px)
    policy.model.eval()
    with suppress(KeyboardInterrupt), PolicyEngine(policy, seed=0, max_running=16) as engine:
        print(f"http://{engine.host}:{engine.ports[0]}", flush=True)
        sys.stdin.read()
        engine.check()


if __name__ == "__main__":
    main()
