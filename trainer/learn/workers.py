"""Processes that roll out: each runs slime's rollout code on its own daemon and share of the tasks.

Most of a turn is encoding and tokenising on one core, so several processes feed one GPU. Image patches come back
through files, because a pipe would carry two megabytes for every row.
"""

import hashlib
import logging
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trainer.data.split import template_id
from trainer.learn import LearnError
from trainer.learn.loss import TrainRow, rows_of, trained_rows
from trainer.learn.record import HeldOutScore
from trainer.learn.settings import HELD_OUT_SEED, VALIDATION_SEED, Settings
from trainer.workers import WorkerProcess

if TYPE_CHECKING:
    from trainer.learn.slime_job import SlimeRollouts

Row = TypeVar("Row")

logger = logging.getLogger(__name__)
_STOP_S = 30.0
#: Data sets of a process, files `NAME.jsonl` in its directory.
TRAIN, VALIDATION, HELD_OUT = "train", "validation", "held_out"


@dataclass(slots=True)
class Batch:
    """What the processes rolled out together."""

    rows: list[TrainRow] = field(default_factory=list)
    rollout_count: int = 0
    """Rollouts with an advantage."""
    patches: list[Any] = field(default_factory=list)
    """Patches of the images that rows name."""
    records: list[Any] = field(default_factory=list)
    """Records of `trainer.slime.monitor`, for metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What one process works with."""

    index: int
    slime_home: Path
    checkpoint: Path
    host: str
    engine_host: str
    engine_port: int
    groups: int
    directory: Path
    """Directory of its data sets and the position in them."""
    exchange: Path
    """Directory of the files with patches."""
    settings: Settings
    seed: int


def of_process(records: Sequence[Any], index: int, *, count: int) -> list[Any]:
    """Return a process's records with group numbers that no other one has: each counts its groups from 0."""
    return [replace(record, group_index=record.group_index * count + index) for record in records]


def distinct_images(patches: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct ones of tensors, and the index of each tensor among them."""
    import torch  # noqa: PLC0415 -- seconds

    place_of: dict[bytes, int] = {}
    distinct: list[Any] = []
    places = []
    for each in patches:
        digest = hashlib.sha256(each.contiguous().view(torch.int16).numpy()).digest()
        if digest not in place_of:
            place_of[digest] = len(distinct)
            distinct.append(each)
        places.append(place_of[digest])
    return distinct, places


def task_ids(splits: Mapping[str, str], *, settings: Settings) -> tuple[list[str], list[str]]:
    """Return the tasks to train on and to evaluate on, from the split of each template.

    If there are fewer training tasks than groups of an update, each is repeated. With `rl.tasks`, there may be no
    held-out ones.

    Raises:
        LearnError: A split is empty, or a chosen task is not of a training template.
    """
    templates = sorted(template for template, split in splits.items() if split == "train")
    chosen = settings.rl.tasks or templates
    for task in chosen:
        if template_id(task) not in templates:
            raise LearnError(f"rl.tasks: {task}: not a training template; choose from {', '.join(templates) or 'none'}")
    train = [task for task in chosen if "?" in task]
    train += [
        f"{template}?seed={seed}"
        for seed in range(settings.rl.train_seeds)
        for template in chosen
        if "?" not in template
    ]
    if train:
        train *= -(-settings.rl.groups // len(train))
    counts = dict.fromkeys((t for t, split in splits.items() if split != "train"), settings.held_out_template_variants)
    counts |= dict.fromkeys(map(template_id, chosen), settings.held_out_variants)
    held_out = [
        f"{template}?seed={HELD_OUT_SEED + seed}" for template, count in sorted(counts.items()) for seed in range(count)
    ]
    if not train or not (held_out or settings.rl.tasks):
        raise LearnError(
            f"tasks: {len(train)} to train on and {len(held_out)} held out; use a suite with both splits and at least"
            " one held-out variant (held_out_variants)"
        )
    return train, held_out


def shuffled_shares(rows: Sequence[Row], *, count: int, seed: int) -> list[list[Row]]:
    """Return each rollout process's share of a data set's rows, of all templates alike.

    The rows repeat the templates in one order. Each eighth of them would be of two of 16 templates, and a process whose
    two are never solved would play nothing else, whatever the curriculum.
    """
    shuffled = random.Random(seed).sample(rows, len(rows))  # noqa: S311
    return [shuffled[index::count] for index in range(count)]


def validation_ids(train: Sequence[str], *, settings: Settings) -> list[str]:
    """Return the validation variants of the templates of some training tasks."""
    templates = sorted(set(map(template_id, train)))
    return [
        f"{each}?seed={VALIDATION_SEED + seed}" for each in templates for seed in range(settings.validation_variants)
    ]


class RolloutProcesses:
    """All processes. Use as a context manager."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        """Entering starts the processes."""
        self._specs = specs
        self._processes: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        self._processes = [WorkerProcess(_work, spec, name=f"rollout-{spec.index}") for spec in self._specs]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.stop(("stop",), timeout_s=_STOP_S if kind is None else 1.0)

    def rollout(self, number: int, *, device: Any) -> Batch:
        """Roll out once; the patches are on `device`. Raises: LearnError: A process failed."""
        import torch  # noqa: PLC0415 -- seconds

        found = Batch()
        for index, answer in enumerate(self._ask(("rollout", number))):
            images = [len(found.patches) + image for image in answer["images"]]
            rows = rows_of(answer["data"], images=images)
            found.rows += rows
            found.rollout_count += len(set(answer["data"]["rollout_ids"]))
            found.records += of_process(answer["records"], index, count=len(self._specs))
            if rows:
                path = self._specs[index].exchange / f"{index}.bin"
                flat = torch.from_file(str(path), size=math.prod(answer["shape"]), dtype=torch.bfloat16)
                # Copied: the process overwrites its file in the next rollout.
                found.patches += flat.reshape(answer["shape"]).to(device, copy=True).unbind()
        return found

    def evaluate(self, number: int, *, temperature: float, tasks: str = HELD_OUT) -> list[HeldOutScore]:
        """Play the tasks of one of the processes' data sets. Raises: LearnError: A process failed."""
        return [score for scores in self._ask(("evaluate", number, temperature, tasks)) for score in scores]

    def save(self, number: int) -> None:
        self._ask(("save", number))

    def load(self, number: int) -> None:
        self._ask(("load", number))

    def _ask(self, command: tuple[Any, ...]) -> list[Any]:
        for process, spec in zip(self._processes, self._specs, strict=True):
            try:
                process.pipe.send(command)
            except OSError as error:
                raise LearnError(_ended(spec)) from error
        answers = []
        for process, spec in zip(self._processes, self._specs, strict=True):
            try:
                is_good, answer = process.pipe.recv()
            except (EOFError, OSError) as error:
                raise LearnError(_ended(spec)) from error
            if not is_good:
                raise LearnError(f"rollout process {spec.index}: {answer}; continue with --resume")
            answers.append(answer)
        return answers


def _ended(spec: WorkerSpec) -> str:
    return f"rollout process {spec.index}: it ended; see {spec.directory}/log, and continue with --resume"


def exchange_directory() -> Path:
    """Return a new directory for patches: in memory if there is room."""
    shared = Path("/dev/shm")  # noqa: S108  (mkdtemp makes it private)
    has_room = shared.is_dir() and shutil.disk_usage(shared).free > 4 << 30
    return Path(tempfile.mkdtemp(prefix="learn-", dir=shared if has_room else None))


# In the process


def _work(pipe: Connection, spec: WorkerSpec) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
    spec.directory.mkdir(parents=True, exist_ok=True)
    # slime's bars of progress go to the log, too.
    log = (spec.directory / "log").open("a", encoding="utf-8")
    os.dup2(log.fileno(), 2)
    logging.basicConfig(stream=log, level=logging.WARNING, force=True)
    try:
        rollouts = _rollouts_of(spec)
    except Exception as error:
        logger.exception("rollout process %d", spec.index)
        pipe.recv()
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    commands: dict[str, Callable[..., Any]] = {
        "rollout": partial(_roll_out, spec, rollouts),
        "evaluate": partial(_evaluate, spec, rollouts),
        "save": rollouts.data_source.save,
        "load": rollouts.data_source.load,
    }
    while (command := pipe.recv())[0] != "stop":
        try:
            answer = (True, commands[command[0]](*command[1:]))
        except Exception as error:
            logger.exception("rollout process %d", spec.index)
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)


def _rollouts_of(spec: WorkerSpec) -> "SlimeRollouts":
    import torch  # noqa: PLC0415 -- seconds

    from trainer.learn.slime_job import SlimeRollouts, slime_args, use_slime  # noqa: PLC0415

    torch.set_num_threads(1)
    use_slime(spec.slime_home)
    settings, rl = spec.settings, spec.settings.rl
    given = {
        "hf_checkpoint": str(spec.checkpoint),
        "prompt_data": str(spec.directory / f"{TRAIN}.jsonl"),
        "sglang_router_ip": spec.engine_host,
        "sglang_router_port": spec.engine_port,
        "rollout_batch_size": spec.groups,
        "over_sampling_batch_size": spec.groups,
        "n_samples_per_prompt": rl.members,
        "global_batch_size": spec.groups * rl.members,
        "rollout_max_response_len": settings.reply_tokens,
        "rollout_temperature": rl.temperature,
        "rollout_seed": spec.seed * 1000 + spec.index,
        "advantage_estimator": rl.estimator,
        "save": str(spec.directory),
        "load": str(spec.directory),
    }
    if rl.envd.get("credit") == "siblings":
        # Required by it; here `trainer.learn.loss` reads the advantages from the rewards.
        given["custom_advantage_function_path"] = "trainer.slime.hooks.advantages"
    return SlimeRollouts(slime_args(settings.plugin(spec.host), **{**given, **rl.slime}))


def _roll_out(spec: WorkerSpec, rollouts: "SlimeRollouts", number: int) -> dict[str, Any]:
    """Roll out and write patches; returns slime's train data of the rows with an advantage."""
    import torch  # noqa: PLC0415 -- imported before

    from trainer.slime.monitor import records_of  # noqa: PLC0415
    from trainer.slime.play.samples import flatten  # noqa: PLC0415

    groups = rollouts.rollout(number).samples
    data = rollouts.train_data(groups)
    chosen = trained_rows(data)
    inputs = data.pop("multimodal_train_inputs", [])
    answer: dict[str, Any] = {
        "data": {name: [column[index] for index in chosen] for name, column in data.items()},
        "records": records_of(rollouts.args, flatten(groups)),
        "images": [],
    }
    if chosen:
        distinct, images = distinct_images([inputs[index]["pixel_values"] for index in chosen])
        patches = torch.stack(distinct)
        patches.view(torch.int16).numpy().tofile(spec.exchange / f"{spec.index}.bin")
        answer |= {"shape": tuple(patches.shape), "images": images}
    return answer


def _evaluate(
    spec: WorkerSpec, rollouts: "SlimeRollouts", number: int, temperature: float, tasks: str
) -> list[HeldOutScore]:
    """Play this process's tasks of a data set."""
    from slime.utils.eval_config import EvalDatasetConfig  # noqa: PLC0415 -- from the user's checkout

    from trainer.slime.play.samples import facts_of, is_void  # noqa: PLC0415

    path = spec.directory / f"{tasks}.jsonl"
    if not path.read_text(encoding="utf-8"):
        return []
    args = rollouts.args
    args.eval_datasets = [
        EvalDatasetConfig(
            name=tasks,
            path=str(path),
            input_key="prompt",
            metadata_key="metadata",
            temperature=temperature,
            top_p=1.0,
            top_k=-1,
            n_samples_per_eval_prompt=1,
            max_response_len=spec.settings.reply_tokens,
        )
    ]
    samples = rollouts.evaluate(number).data[tasks]["samples"]
    return [
        HeldOutScore(
            task_id=sample.metadata["task_id"],
            score=None if is_void(sample) else float(facts_of(sample)["task_score"]),
            guest_end_cause=facts_of(sample).get("guest_end_cause", ""),
        )
        for sample in samples
    ]
