"""Stage `replay`: one held-out task before and after reinforcement, played on the real path and recorded."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from cuaenv.client import Action, Checkpoint, Observation, StepResult
from trainer.agent.coordinates import points_of
from trainer.agent.loop import AgentEpisode
from trainer.agent.types import Outcome, Trajectory
from trainer.learn import LearnError
from trainer.learn.record import read_evaluations
from trainer.learn.settings import Settings
from trainer.learn.slime_job import write_tasks
from trainer.slime.environments import SampleEnvironments, WrappedEpisode
from trainer.slime.generate import run_sample
from trainer.slime.rollout import Rollout

_DIRECTORY = "played"
_FILE = "episode.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """One reply."""

    frame: int
    """Index of the frame that it replies to."""
    text: str
    point: tuple[float, float] | None
    """Its last point, as a share of the screen's width and height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One recorded episode."""

    task_id: str
    instruction: str
    score: float | None
    """None if it is void."""
    error: str
    turns: Sequence[PlayedTurn]
    frames: Sequence[Image.Image]


# In the rollout process


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run a sample and record its episode in the directory `args.save`."""
    return await run_sample(args, sample, sampling_params, evaluation=evaluation, rollout_type=_RecordedRollout)


class _RecordedRollout(Rollout):
    _recorder: "_Recorder | None" = None

    async def run(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        trajectory = await super().run(start, group_size=group_size)
        if trajectory is not None:
            observations = self._recorder.observations if self._recorder else []
            _write(Path(self.args.save) / _DIRECTORY, trajectory, observations)
        return trajectory

    def wrap(self, environments: SampleEnvironments, episode: AgentEpisode) -> AgentEpisode:  # noqa: ARG002 -- only the episode
        self._recorder = _Recorder(episode)
        return self._recorder


class _Recorder(WrappedEpisode):
    """An episode that keeps its observations."""

    def __init__(self, episode: AgentEpisode) -> None:
        super().__init__(episode)
        self.observations: list[Observation] = [episode.observation]

    async def step(self, *actions: Action, **options: Any) -> StepResult:
        result = await super().step(*actions, **options)
        self.observations.append(result.observation)
        return result


def _write(directory: Path, trajectory: Trajectory, observations: Sequence[Observation]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for index, observation in enumerate(observations):
        observation.image.save(directory / f"{index:03}.png")
    is_void = trajectory.outcome is Outcome.FAILED or trajectory.evaluation is None
    episode = {
        "task_id": trajectory.task_id,
        "instruction": trajectory.instruction,
        "score": None if is_void or trajectory.evaluation is None else trajectory.evaluation.score,
        "error": str(trajectory.error or ""),
        "turns": [asdict(turn) for turn in _turns(trajectory, observations)],
    }
    (directory / _FILE).write_text(json.dumps(episode), encoding="utf-8")


def _turns(trajectory: Trajectory, observations: Sequence[Observation]) -> Iterator[PlayedTurn]:
    frame = 0
    for turn in trajectory.turns:
        points = [point for action in turn.actions for point in points_of(action)]
        x, y = points[-1] if points else (0, 0)
        seen = observations[frame]
        place = (x / seen.screen_width_px, y / seen.screen_height_px) if points else None
        yield PlayedTurn(frame=frame, text=turn.reply.text, point=place)
        # A reply without a valid action makes no step, and so no frame.
        frame += bool(turn.actions)


# In the learner's process


def play(
    settings: Settings, *, run: Path, name: str, task: str, host: str, slime_home: Path, seed: int
) -> tuple[Played, Played]:
    """Play a task greedily by the cloned policy and by that of a run of the stage `rl`.

    Raises:
        LearnError: A policy is missing, or an episode is void.
    """
    from trainer.learn.engine import Engine  # noqa: PLC0415 -- torch takes seconds
    from trainer.learn.policy import Policy  # noqa: PLC0415
    from trainer.learn.states import load_state  # noqa: PLC0415
    from trainer.learn.workers import Workers, WorkerSpec, exchange_directory  # noqa: PLC0415

    states = []
    for stage, source in (("clone", run / "clone"), ("rl", run / name)):
        if (state := load_state(source, None, stage=stage)) is None:
            raise LearnError(f"run {source}: no saved policy; run the stage `{stage}` first")
        states.append(state)
    policy = Policy(run / "demos" / "model", device=settings.torch_device, image_px=settings.screen_px)
    policy.model.eval()
    directory, exchange = run / name / "replay", exchange_directory()
    for file in ("train.jsonl", "held_out.jsonl"):
        write_tasks(directory / file, [task])
    with ExitStack() as running:
        running.callback(shutil.rmtree, exchange, ignore_errors=True)
        running.callback(shutil.rmtree, directory, ignore_errors=True)
        engine = running.enter_context(Engine(policy, seed=seed, max_running=1))
        spec = WorkerSpec(
            index=0,
            slime_home=slime_home,
            checkpoint=run / "demos" / "model",
            host=host,
            engine_host=engine.host,
            engine_port=engine.ports[0],
            groups=1,
            directory=directory,
            exchange=exchange,
            settings=settings,
            seed=seed,
            generate="trainer.learn.replay.generate",
        )
        workers = running.enter_context(Workers([spec]))
        played = []
        for state in states:
            policy.model.load_state_dict(state.model)
            workers.evaluate(state.done, temperature=0.0)
            engine.check()
            played.append(_read(directory / _DIRECTORY, task))
    return played[0], played[1]


def _read(directory: Path, task: str) -> Played:
    episode = json.loads((directory / _FILE).read_text(encoding="utf-8"))
    if episode["score"] is None:
        raise LearnError(f"task {task}: its episode is void: {episode['error']}; repeat the command or change --task")
    frames = [Image.open(path).convert("RGB") for path in sorted(directory.glob("*.png"))]
    # The next episode must not find these files if it records none.
    shutil.rmtree(directory)
    return Played(**{**episode, "turns": [PlayedTurn(**turn) for turn in episode["turns"]]}, frames=frames)


def choose_task(directory: Path) -> str:
    """Return a held-out task that a run failed first and solved last; else one that it solved, else any.

    Raises:
        LearnError: The run has no evaluation.
    """
    greedy = [each for each in read_evaluations(directory) if each.temperature == 0]
    if not greedy:
        raise LearnError(f"run {directory}: no evaluation to choose a task from; run the stage `rl`, or give --task")
    first, last = ({score.task_id: score.score or 0.0 for score in each.scores} for each in (greedy[0], greedy[-1]))
    return max(last, key=lambda task: (last[task], last[task] - first.get(task, 0.0)))
