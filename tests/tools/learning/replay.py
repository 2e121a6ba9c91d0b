"""One task before and after reinforcement, played on the real path, recorded, and drawn as a GIF."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from cuaenv.client import Action, Checkpoint, Observation, StepResult
from tests.tools.learning.wrapped import WrappedEpisode
from trainer.agent.coordinates import points_of
from trainer.agent.loop import AgentEpisode
from trainer.agent.types import Conversation, Outcome, Trajectory
from trainer.learn import LearnError
from trainer.learn.record import read_evaluations
from trainer.learn.settings import Settings
from trainer.learn.slime_job import write_tasks
from trainer.slime.job import job_of
from trainer.slime.play.rollout import Rollout

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
    return await job_of(args).play_sample(
        args, sample, sampling_params, evaluation=evaluation, rollout_type=_RecordedRollout
    )


class _RecordedRollout(Rollout):
    _recorder: "_Recorder | None" = None

    async def play_attempts(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        trajectory = await super().play_attempts(start, group_size=group_size)
        if trajectory is not None:
            observations = self._recorder.observations if self._recorder else []
            _write(Path(self.args.save) / _DIRECTORY, trajectory, observations)
        return trajectory

    async def play_episode(self, episode: AgentEpisode, conversation: Conversation) -> Trajectory:
        self._recorder = _Recorder(episode)
        return await super().play_episode(self._recorder, conversation)


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
    from trainer.learn.engine import PolicyEngine
    from trainer.learn.policy import Policy
    from trainer.learn.states import load_state
    from trainer.learn.workers import RolloutProcesses, WorkerSpec, exchange_directory

    states = []
    for stage, source in (("clone", run / "clone"), ("rl", run / name)):
        if (state := load_state(source, None, stage=stage)) is None:
            raise LearnError(f"run {source}: no saved policy; run the stage `{stage}` first")
        states.append(state)
    policy = Policy(run / "demos" / "model", device=settings.torch_device, image_px=settings.image_px)
    policy.model.eval()
    directory, exchange = run / name / "replay", exchange_directory()
    recording = settings.rl.model_copy(update={"slime": {"custom_generate_function_path": f"{__name__}.generate"}})
    settings = settings.model_copy(update={"rl": recording})
    for file in ("train.jsonl", "held_out.jsonl"):
        write_tasks(directory / file, [task])
    with ExitStack() as running:
        running.callback(shutil.rmtree, exchange, ignore_errors=True)
        running.callback(shutil.rmtree, directory, ignore_errors=True)
        engine = running.enter_context(PolicyEngine(policy, seed=seed, max_running=1))
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
        )
        workers = running.enter_context(RolloutProcesses([spec]))
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


_TURN_MS, _END_MS = 1500, 3000
_MARGIN, _LINE = 12, 20
_HEAD_LINES, _REPLY_LINES = 2, 4
_PAPER, _INK, _FAINT, _POINTER = "#f6f8fa", "#1f2328", "#656d76", "#d1242f"
_FONT_PX = 15
_CHARACTER_PX = 8


def draw(path: Path, sides: Sequence[tuple[str, Played]]) -> None:
    """Write a GIF; each side has a title and an episode, and waits at its end for the longer one."""
    count = max(len(played.turns) for _, played in sides)
    pictures = [_picture(sides, index) for index in range(count + 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    durations = [_TURN_MS] * count + [_END_MS]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True)


def _picture(sides: Sequence[tuple[str, Played]], index: int) -> Image.Image:
    width, height = sides[0][1].frames[0].size
    top = _MARGIN + _HEAD_LINES * _LINE + _LINE
    picture = Image.new(
        "RGB", (_MARGIN + len(sides) * (width + _MARGIN), top + height + (_REPLY_LINES + 1) * _LINE), _PAPER
    )
    page, font = ImageDraw.Draw(picture), ImageFont.load_default(_FONT_PX)
    for row, line in enumerate(wrap(sides[0][1].instruction, picture.width // _CHARACTER_PX)[:_HEAD_LINES]):
        page.text((_MARGIN, _MARGIN + row * _LINE), line, fill=_INK, font=font)
    for column, (title, played) in enumerate(sides):
        left = _MARGIN + column * (width + _MARGIN)
        has_ended = index >= len(played.turns)
        verdict = f": {'solved' if (played.score or 0) >= 1 else 'failed'}" if has_ended else ""
        page.text((left, top - _LINE), f"{title}{verdict}", fill=_INK, font=font)
        if has_ended:
            picture.paste(played.frames[-1], (left, top))
            continue
        turn = played.turns[index]
        picture.paste(played.frames[turn.frame], (left, top))
        if turn.point is not None:
            _draw_pointer(page, left + turn.point[0] * width, top + turn.point[1] * height)
        text = wrap(" ".join(turn.text.split()), width // _CHARACTER_PX)[:_REPLY_LINES]
        for row, line in enumerate(text):
            page.text((left, top + height + _LINE // 2 + row * _LINE), line, fill=_FAINT, font=font)
    return picture


def _draw_pointer(page: ImageDraw.ImageDraw, x: float, y: float) -> None:
    page.ellipse((x - 11, y - 11, x + 11, y + 11), outline=_POINTER, width=2)
    arrow = [(0, 0), (0, 16), (4, 12), (7, 18), (10, 17), (7, 11), (12, 11)]
    page.polygon([(x + dx, y + dy) for dx, dy in arrow], fill="#ffffff", outline="#000000")
