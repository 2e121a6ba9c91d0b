"""How many files of this project one sample goes through."""

import sys
import threading
from pathlib import Path
from types import FrameType

from tests.support.counting import AGENT, PARAMS, TASK, counting
from tests.support.desktops import DrawnDesktops
from tests.support.slime import Sample, ScriptedEngine, stand_in_args, stand_in_slime
from trainer.slime.hooks import generate
from trainer.slime.play.samples import facts_of

ROOT = Path(__file__).parents[2]
#: Change it with the code: fewer files are fewer to read for a change.
MAX_FILES = 65


async def test_one_sample_goes_through_few_files() -> None:
    """Count the files whose code runs in the trainer, without the daemon, the engine and what is imported."""
    desktops = DrawnDesktops(size=1, capacity=2)
    found = set[Path]()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(Path(frame.f_code.co_filename))

    with stand_in_slime(ScriptedEngine(counting)):
        args = stand_in_args(
            {"hosts": [desktops.address], "engine_timeout_s": 20.0, "agent": AGENT}, n_samples_per_prompt=1
        )
        # The first one also imports and checks.
        for index in range(2):
            sample = Sample(group_index=index, index=index, metadata={"task_id": TASK})
            if index:
                threading.setprofile(called)
                sys.setprofile(called)
            try:
                await generate(args, sample, PARAMS)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
            assert facts_of(sample)["reason"] == "done"
    desktops.close()
    own = sorted(str(path.relative_to(ROOT)) for path in found if path.is_relative_to(ROOT))
    # The engine's double is served by trainer.learn.
    files = [name for name in own if name.startswith(("trainer/", "proto/cuaenv/")) and "_pb2" not in name]
    files = [name for name in files if not name.startswith("trainer/learn/")]
    print(f"{len(files)} files:", *files)
    assert 40 < len(files) <= MAX_FILES
