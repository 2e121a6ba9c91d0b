"""OSWorld's own `DesktopEnv`, the peer of `envd bench episodes`, and a side of `envd tasks parity`.

Each concurrent episode has a process. Its machines are made by the same hypervisor from the same image, and boot for
every episode, as with OSWorld's Docker provider. `envd.bench.peer_program` has the flow.
"""

import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from envd.bench.child import Child, run_program
from envd.bench.report import BenchFailed
from envd.bench.session import BenchSession, new_machine_id
from envd.hypervisor.machine import Machine

_PROGRAM = Path(__file__).parent / "peer_program.py"
_TAIL_CHARS = 600
#: Fixed pauses of OSWorld's runner.
RESET_PAUSE_S = 60.0
EVALUATE_PAUSE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEpisode:
    """An episode to play."""

    task: dict[str, Any]
    actions: Sequence[str]
    """Calls of pyautogui, WAIT, DONE or FAIL: one text for each step."""
    awaits_first_change: bool = True
    """Whether to wait after the first action until the screen has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """A finished episode of either side, with its times in seconds."""

    score: float
    reset_s: float
    steps_s: Sequence[float]
    """Duration of each step, without thinking."""
    evaluate_s: float
    screens: Sequence[str] = ()
    """PNG in base64 of the first screen and of the last one before the evaluation; of the peer only."""


async def play_as_peer(
    bench: BenchSession,
    python: Path,
    episodes: Sequence[PeerEpisode],
    *,
    think_s: float,
    step_pause_s: float,
    on_episode: Callable[[], None],
) -> list[PlayedEpisode]:
    """Play episodes one after another in one `DesktopEnv`; its machines are destroyed afterwards.

    `DesktopEnv.step` pauses for `step_pause_s` after each action.
    """
    played: list[PlayedEpisode] = []
    machine: Machine | None = None
    spec = bench.template.spec
    plan = {
        "episodes": [asdict(episode) for episode in episodes],
        "screen_px": [spec.screen_width_px, spec.screen_height_px],
        "think_s": think_s,
        "pause_after_reset_s": RESET_PAUSE_S,
        "pause_after_step_s": step_pause_s,
        "pause_before_evaluate_s": EVALUATE_PAUSE_S,
    }
    try:
        async with _peer(python) as (process, log):
            process.stdin.write(json.dumps(plan).encode() + b"\n")
            while line := await process.stdout.readline():
                message = json.loads(line)
                if "episode" in message:
                    played.append(PlayedEpisode(**message["episode"]))
                    on_episode()
                    continue
                response = ""
                if message["request"] == "start":
                    machine = await bench.daemon.hypervisor.create(replace(spec, machine_id=new_machine_id()))
                    if machine.guestd_url is None:
                        raise BenchFailed(f"machine {machine.machine_id}: it has no guestd, which OSWorld needs")
                    response = machine.guestd_url.removeprefix("http://")
                elif machine is not None:
                    await machine.destroy()
                process.stdin.write(response.encode() + b"\n")
            if len(played) < len(episodes):
                tail = log.read_text(errors="replace")[-_TAIL_CHARS:]
                raise BenchFailed(f"OSWorld's DesktopEnv ended after {len(played)} of {len(episodes)} episodes: {tail}")
    finally:
        if machine is not None:
            await machine.destroy()
    return played


@asynccontextmanager
async def _peer(python: Path) -> AsyncIterator[tuple[Child, Path]]:
    """Run the program in an empty directory; yield its process and its log. Afterwards it is killed."""
    with tempfile.TemporaryDirectory(prefix="envd-peer-") as directory:
        log = Path(directory) / "log"
        with log.open("w") as errors:
            running = run_program(
                *(str(python), "-I", str(_PROGRAM)),
                stderr=errors,
                cwd=directory,
                env={**os.environ, "TMPDIR": directory},
            )
            async with running as child:
                yield child, log
