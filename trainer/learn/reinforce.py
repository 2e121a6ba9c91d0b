"""Stage `rl`: roll out a batch, make slime's policy gradient steps, evaluate now and then, save."""

import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

import torch

from trainer.learn import LearnError
from trainer.learn.engine import PolicyEngine
from trainer.learn.loss import TrainRow, policy_loss, token_weights, trained_tokens
from trainer.learn.policy import Policy, memory_errors
from trainer.learn.record import HeldOutEvaluation, HeldOutScore, MetricsLog, recorded, shares_of_all
from trainer.learn.settings import Reinforce, Settings
from trainer.learn.slime_job import use_slime, write_tasks
from trainer.learn.states import RunState, load_state, make_optimizer, save_state, train_step
from trainer.learn.workers import (
    HELD_OUT,
    TRAIN,
    VALIDATION,
    Batch,
    RolloutProcesses,
    WorkerSpec,
    exchange_directory,
    shuffled_shares,
    task_ids,
    validation_ids,
)
from trainer.slime.config import Halt
from trainer.slime.monitor import Guard, metrics_of

logger = logging.getLogger(__name__)
_WARMUP_UPDATES = 5
#: Replies that are sampled at once; a token costs as much for fewer.
_MAX_RUNNING = 512


class Learner:
    """The policy, its optimiser and the processes that roll out. Made by `learner`."""

    def __init__(
        self,
        policy: Policy,
        engine: PolicyEngine,
        workers: RolloutProcesses,
        *,
        settings: Settings,
        directory: Path,
        log: MetricsLog,
    ) -> None:
        """Take what `learner` started."""
        self.policy = policy
        self._engine = engine
        self._workers = workers
        self._settings = settings
        self.directory = directory
        self._log = log
        self._micro_rows = settings.rl.micro_rows
        self._optimizer = make_optimizer(policy.model, learning_rate=settings.rl.learning_rate)
        self._guard = Guard(Halt(**settings.rl.envd.get("halt", {})))
        self.done = 0
        """Updates."""
        self.env_steps = 0
        """Turns of all training episodes, also of void ones."""

    def restore(self, *, resume: bool) -> None:
        state = load_state(self.directory, self._settings, stage="rl", resume=resume)
        if state is None:
            return
        self.policy.model.load_state_dict(state.model)
        self._optimizer.load_state_dict(state.optimizer)
        self._engine.generator.set_state(state.more["generator"])
        self._micro_rows = state.more["micro_rows"]
        self._workers.load(state.done - 1)
        self.env_steps = state.more.get("env_steps", 0)
        self.done = self._engine.weight_version = state.done

    def save(self) -> None:
        self._workers.save(self.done - 1)
        generator = self._engine.generator.get_state()
        save_state(
            self.directory,
            RunState.of(
                self.policy.model,
                self._optimizer,
                self._settings,
                stage="rl",
                done=self.done,
                generator=generator,
                micro_rows=self._micro_rows,
                env_steps=self.env_steps,
            ),
        )

    def update(self) -> None:
        """Roll out once and train on it. Raises: LearnError, Halted."""
        started_s = time.monotonic()
        self.policy.model.eval()
        with self._engine_checked():
            rollout = self._workers.rollout(self.done, device=self.policy.device)
        rolled_s = time.monotonic() - started_s
        metrics = metrics_of(rollout.records)
        self._guard.check(self.done, metrics)
        trained = self._train(rollout)
        self.done += 1
        self._engine.weight_version = self.done
        seconds = time.monotonic() - started_s
        # Shared turns were taken once, in another member, or given.
        turns = sum(record.facts.get("turns", 0) - record.facts.get("shared_turns", 0) for record in rollout.records)
        self.env_steps += turns
        speed = {
            "rollout_s": rolled_s,
            "s": seconds,
            "env_steps": float(self.env_steps),
            "steps_per_s": turns / seconds,
            "rollout_steps_per_s": turns / rolled_s,
            **shares_of_all([record.facts for record in rollout.records]),
        }
        self._log.write("rl", self.done, {**metrics, **trained, **speed, "rows_trained": float(len(rollout.rows))})

    def evaluate(self, *, temperature: float) -> list[HeldOutScore]:
        """Play the held-out tasks, if there are any, and add the scores to `evaluations.jsonl`. Raises: LearnError."""
        with self._engine_checked():
            scores = self._workers.evaluate(self.done, temperature=temperature)
        if not scores:
            return scores
        evaluation = HeldOutEvaluation(
            update=self.done, env_steps=self.env_steps, temperature=temperature, scores=scores
        )
        evaluation.add_to(self.directory)
        kind = "sampled" if temperature else "greedy"
        self._log.write(f"held_out_{kind}", self.done, success_of(scores))
        return scores

    def validate(self) -> None:
        """Play the validation episodes, if there are any, and log their success. Raises: LearnError."""
        with self._engine_checked():
            scores = self._workers.evaluate(self.done, temperature=1.0, tasks=VALIDATION)
        if scores:
            self._log.write(VALIDATION, self.done, success_of(scores))

    @contextmanager
    def _engine_checked(self) -> Iterator[None]:
        """Report that the engine failed rather than what rollout processes made of it. Raises: LearnError."""
        try:
            yield
        finally:
            self._engine.check()

    # Training

    def _train(self, rollout: Batch) -> dict[str, float]:
        options, sums = self._settings.rl, {"loss": 0.0, "clip_frac": 0.0, "kl": 0.0, "mismatch": 0.0}
        if not rollout.rows:
            return sums
        sums["entropy"] = 0.0
        order = list(rollout.rows)
        random.Random(self.done).shuffle(order)  # noqa: S311 - not a secret
        share = -(-len(order) // options.steps_per_rollout)
        parts = [order[start : start + share] for start in range(0, len(order), share)]
        norms = []
        rate = options.learning_rate * min(1.0, (self.done + 1) / _WARMUP_UPDATES)
        for number, rows in enumerate(parts):
            rollouts = max(1, round(rollout.rollout_count * len(rows) / len(order)))
            count = trained_tokens(rows) if options.per_token_loss else rollouts
            for name, value in self._gradient(rows, rollout.patches, count=count).items():
                sums[name] += value / len(parts)
            what = f"update {self.done}, step {number}"
            norms.append(train_step(self.policy.model, self._optimizer, None, learning_rate=rate, what=what))
        return {**sums, "grad_norm": fmean(norms), "learning_rate": rate}

    def _gradient(self, rows: Sequence[TrainRow], patches: Sequence[torch.Tensor], *, count: int) -> dict[str, float]:
        """Add the gradient of some rows, with smaller batches while no GPU memory is left. Raises: LearnError."""
        # Members of a group often saw the same screen, which a forward pass encodes once.
        rows = sorted(rows, key=lambda row: row.image)
        while True:
            sums: dict[str, float] = {}
            try:
                for start in range(0, len(rows), self._micro_rows):
                    micro = rows[start : start + self._micro_rows]
                    with memory_errors():
                        loss, found = self._loss(micro, patches, count=count)
                        loss.backward()
                    for name, value in {"loss": loss.detach(), **found}.items():
                        sums[name] = sums.get(name, 0.0) + float(value)
            except torch.OutOfMemoryError as error:
                if self._micro_rows == 1:
                    raise LearnError(f"rl: no GPU memory for one row: {error}; use a larger GPU") from error
            else:
                return sums
            # The traceback, which is gone by now, had the tensors of the pass.
            self._micro_rows = max(1, self._micro_rows // 2)
            logger.warning("[learn] rl: no GPU memory; forward passes now have %d rows", self._micro_rows)
            self.policy.model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    def _loss(
        self, rows: Sequence[TrainRow], patches: Sequence[torch.Tensor], *, count: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        policy, options = self.policy, self._settings.rl
        longest = max(len(row.tokens) for row in rows)
        table = [[*row.tokens, *[policy.pad_id] * (longest - len(row.tokens))] for row in rows]
        ids = torch.tensor(table, device=policy.device)
        lengths = [row.response_length for row in rows]
        places = [
            (index, len(row.tokens) - row.response_length + i)
            for index, row in enumerate(rows)
            for i in range(lengths[index])
        ]
        at = torch.tensor(places, device=policy.device).T
        distinct = sorted({row.image for row in rows})
        images = torch.stack([patches[image] for image in distinct]).float()
        image_B = torch.tensor([distinct.index(row.image) for row in rows], device=policy.device)
        logits = policy.logits(ids, images, (at[0], at[1]), image_B=image_B) / options.temperature
        table_NV = torch.log_softmax(logits, dim=-1)
        log_probs = table_NV.gather(1, ids[at[0], at[1]][:, None])[:, 0]
        # Tokens that were given, not sampled, may be suppressed ones.
        log_probs = torch.where(log_probs.isinf(), 0.0, log_probs)
        weights = token_weights(rows, per_token=options.per_token_loss, count=count, device=policy.device)
        loss, sums = policy_loss(
            rows,
            list(log_probs.split(lengths)),
            weights,
            estimator=options.estimator,
            eps_clip=options.eps_clip,
            eps_clip_high=options.eps_clip_high,
        )
        with torch.no_grad():
            entropy_N = -(table_NV.exp() * table_NV.clamp_min(-100)).sum(-1)
            sums["entropy"] = (entropy_N * weights).sum()
        return loss, sums


@contextmanager
def learner(
    settings: Settings, *, run: Path, hosts: Sequence[str], slime_home: Path, name: str, seed: int, log: MetricsLog
) -> Iterator[Learner]:
    """Start the engine and the rollout processes of a cloned policy, and yield the learner.

    Raises:
        LearnError: There is no cloned policy, or something cannot start.
    """
    use_slime(slime_home)
    # slime compiles its loss, which needs a C compiler and saves nothing here.
    torch.compiler.set_stance("force_eager")
    directory = run / name
    policy = Policy(run / "demos" / "model", device=settings.torch_device, image_px=settings.image_px)
    cloned = load_state(run / "clone", None, stage="clone")
    if cloned is None:
        raise LearnError(f"run {run}: no cloned policy; run the stage `clone` first")
    policy.model.load_state_dict(cloned.model)
    policy.model.eval()
    torch.manual_seed(seed)
    splits = json.loads((run / "demos" / "splits.json").read_text(encoding="utf-8"))
    train, held_out = task_ids(splits, settings=settings)
    tasks = {TRAIN: train, VALIDATION: validation_ids(train, settings=settings), HELD_OUT: held_out}
    most = min(_MAX_RUNNING, settings.rl.groups * settings.rl.members)
    with _players(
        policy, settings, directory, hosts=hosts, slime_home=slime_home, seed=seed, tasks=tasks, max_running=most
    ) as (engine, workers):
        yield Learner(policy, engine, workers, settings=settings, directory=directory, log=log)


@contextmanager
def validation(
    policy: Policy, settings: Settings, *, run: Path, hosts: Sequence[str], slime_home: Path, seed: int
) -> Iterator[Callable[[int], dict[str, float]]]:
    """Yield a function that plays the validation episodes by a policy that is being cloned.

    It takes the number of steps so far and returns `success_of` the episodes.

    Raises:
        LearnError: Something cannot start; the function raises it if the engine or a process failed.
    """
    splits = json.loads((run / "demos" / "splits.json").read_text(encoding="utf-8"))
    ids = validation_ids(task_ids(splits, settings=settings)[0], settings=settings)
    # slime requires training tasks in each process, and checks each one; these are not trained.
    tasks = {TRAIN: ids * settings.workers, VALIDATION: ids}
    directory, most = run / "clone", min(_MAX_RUNNING, len(ids))
    with _players(
        policy, settings, directory, hosts=hosts, slime_home=slime_home, seed=seed, tasks=tasks, max_running=most
    ) as (engine, workers):

        def play(done: int) -> dict[str, float]:
            try:
                return success_of(workers.evaluate(done, temperature=1.0, tasks=VALIDATION))
            finally:
                engine.check()

        yield play


def success_of(scores: Sequence[HeldOutScore]) -> dict[str, float]:
    """Return the share of valid episodes that solved their task, and the share of void ones."""
    valid = [score.score for score in scores if score.score is not None]
    solved = fmean(score >= 1 for score in valid) if valid else 0.0
    return {"success_frac": solved, "void_frac": 1 - len(valid) / len(scores)}


@contextmanager
def _players(
    policy: Policy,
    settings: Settings,
    directory: Path,
    *,
    hosts: Sequence[str],
    slime_home: Path,
    seed: int,
    tasks: Mapping[str, Sequence[str]],
    max_running: int,
) -> Iterator[tuple[PolicyEngine, RolloutProcesses]]:
    """Start a policy's engine and the processes that roll out, each with its share of every data set."""
    if settings.torch_device != "cpu":
        # Threads of torch take their cores while they wait, too: 7 of 16, which the rollout processes lacked.
        torch.set_num_threads(1)
    count = min(settings.workers, settings.rl.groups)
    exchange = exchange_directory()
    with ExitStack() as running:
        running.callback(shutil.rmtree, exchange, ignore_errors=True)
        engine = running.enter_context(PolicyEngine(policy, seed=seed, port_count=count, max_running=max_running))
        shares = {name: shuffled_shares(ids, count=count, seed=seed) for name, ids in tasks.items()}
        specs = []
        for index in range(count):
            worker_dir = directory / f"worker-{index}"
            for name, share in shares.items():
                write_tasks(worker_dir / f"{name}.jsonl", share[index])
            specs.append(
                WorkerSpec(
                    index=index,
                    slime_home=slime_home,
                    checkpoint=policy.checkpoint,
                    host=hosts[index % len(hosts)],
                    engine_host=engine.host,
                    engine_port=engine.ports[index],
                    groups=len(range(index, settings.rl.groups, count)),
                    directory=worker_dir,
                    exchange=exchange,
                    settings=settings,
                    seed=seed,
                )
            )
        yield engine, running.enter_context(RolloutProcesses(specs))


def reinforce(learning: Learner, settings: Settings, *, seed: int, resume: bool) -> None:
    """Run the updates, with evaluations at the start, in between and at the end. Raises: LearnError, Halted."""
    learning.restore(resume=resume)
    with recorded(learning.directory, settings, seed=seed):
        if learning.done == 0:
            learning.validate()
            learning.evaluate(temperature=0.0)
            learning.evaluate(temperature=1.0)
        if settings.rl.updates:
            _update(learning, settings.rl)
            learning.save()
            learning.evaluate(temperature=0.0)
            learning.evaluate(temperature=1.0)


def _update(learning: Learner, options: Reinforce) -> None:
    started_s = time.monotonic()
    while learning.done < options.updates:
        is_late = options.seconds and time.monotonic() - started_s > options.seconds
        if is_late or (options.env_steps and learning.env_steps >= options.env_steps):
            break
        learning.update()
        if learning.done % options.save_every == 0:
            learning.save()
        if learning.done % options.validate_every == 0:
            learning.validate()
        if learning.done % options.evaluate_every == 0 and learning.done < options.updates:
            learning.evaluate(temperature=0.0)
