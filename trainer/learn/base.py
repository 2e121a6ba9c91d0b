"""Stage `base`: supervised pre-training on labelled screens, after which a policy can read and point.

```text
process   envd.drawn.screens ──► pictures, questions ──► rows of tokens
this one  rows ──► training; probes of words and fonts that are never trained
```

`trainer.learn.screens` describes rows.
"""

import json
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from cuaenv.client import Action, Click, Done, Drag, PressKeys, TypeText
from trainer.agent.coordinates import CoordinateSpace, to_model_points
from trainer.agent.prompts import system_message
from trainer.evaluate.statistics import wilson
from trainer.files import write_atomically
from trainer.learn.checkpoint import (
    SIZES,
    constant_pieces,
    pack_checkpoint,
    read_packed,
    unpack_checkpoint,
    write_checkpoint,
)
from trainer.learn.policy import Policy
from trainer.learn.record import MetricsLog
from trainer.learn.sampler import ReplySampler, SamplerRequest
from trainer.learn.screens import Questions, RowSource, Screen, read_screens, scaled, world_size
from trainer.learn.settings import Settings
from trainer.learn.states import (
    ProcessLost,
    RunState,
    cosine,
    load_state,
    make_optimizer,
    save_state,
    sum_over_group,
    train_step,
)

logger = logging.getLogger(__name__)
_LOG_EVERY_S = 5.0
_PROBE_SLOTS = 256
_PROBE_SEED = 1_000_000
#: Sets of probes: words and fonts that are never trained; and the look of the suite's tasks.
_PROBES = {"unseen": ("--unseen",), "plain": ("--plain",)}
#: Texts that many questions have in common; each is one token.
_PHRASES = (
    "system\n", "user\n", "assistant\n", "Task: Point at ", "Task: Point at the ", "Task: Read ", "Task: Read the ",
    "Task: Point at what is ", "Task: Read what is ", "left of ", "right of ", "above ", "below ", " ticked?",
    "Task: Point at the close button of ", "Task: Read the text at ", "Task: Is ", "Task: Is the box at ",
    "first ", "second ", "third ", "fourth ", "fifth ", "button", "label", "field", "title", "option", "Task: ",
)  # fmt: skip

# Training


@contextmanager
def _process_group(device: str) -> Iterator[tuple[str, int]]:
    """Yield this process's device, and its rank among those that torchrun started, which take each step together."""
    if world_size() == 1:
        yield device, 0
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    with ExitStack() as running:
        running.callback(torch.distributed.destroy_process_group)
        if rank := torch.distributed.get_rank():
            # Rank 0 saves when it is interrupted: it must not wait in a step for a process that has left.
            _ignore_interruptions(running)
        yield device, rank


def _ignore_interruptions(running: ExitStack) -> None:
    """Ignore SIGINT and SIGTERM until `running` ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        running.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))


def _agreed(seconds: float, count: int, device: torch.device) -> tuple[float, int]:
    """Return the seconds of the process of rank 0, and the sum of all processes' counts."""
    if not torch.distributed.is_initialized():
        return seconds, count
    own_s = seconds if torch.distributed.get_rank() == 0 else 0.0
    both = torch.tensor([own_s, count], dtype=torch.float64, device=device)
    sum_over_group(both)
    return float(both[0]), int(both[1])


def train(settings: Settings, directory: Path, *, start: Path | None, seed: int, log: MetricsLog, resume: bool) -> None:
    """Train from the last saved step, or `start`, or else random weights; write the weights to `directory/model`.

    `directory/probes.json` has the results of the probes. An interruption (SIGINT, SIGTERM) saves the state. Of several
    processes of torchrun, that of rank 0 logs, probes and saves, also when another one ends.

    Raises:
        ProcessLost: Another process of torchrun ended.
        LearnError: The state belongs to other settings, or screens cannot be drawn.
    """
    options = settings.base
    torch.manual_seed(seed)
    untrained = directory / "untrained"
    with ExitStack() as running:
        device, rank = running.enter_context(_process_group(settings.torch_device))
        state = load_state(directory, settings, stage="base", resume=resume)
        if rank == 0 and (state is None or not untrained.exists()):
            if start is None:
                write_untrained(settings, untrained, seed=seed)
            else:
                unpack_checkpoint(start, untrained)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        policy = Policy(untrained, device=device, image_px=settings.image_px)
        optimizer = make_optimizer(policy.model, learning_rate=options.learning_rate)
        done, before_s, samples = 0, 0.0, 0
        if state is not None:
            policy.model.load_state_dict(state.model)
            optimizer.load_state_dict(state.optimizer)
            done, before_s, samples = state.done, float(state.more["seconds"]), int(state.more["samples"])
        if options.is_compiled:
            policy.compile()
        questions = Questions(settings, policy.tokenizer, policy.processor)
        # Other screens than before an interruption, and than another process's.
        first_seed = ((seed * 1000 + done) * 100 + rank) * 1000
        source = running.enter_context(RowSource(settings, untrained, policy.device, seed=first_seed))
        threads = running.enter_context(ThreadPoolExecutor())
        probes = {name: threads.submit(_probe_set, settings, 0, *words) for name, words in _PROBES.items() if rank == 0}
        started_s = time.monotonic()
        last = dict.fromkeys(("log", "probe", "save"), started_s)
        logged, trained_s = (done, samples, started_s), before_s

        def seconds() -> float:
            return before_s + time.monotonic() - started_s

        def save() -> None:
            if rank == 0:
                more = {"seconds": seconds(), "samples": samples}
                save_state(directory, RunState.of(policy.model, optimizer, settings, stage="base", done=done, **more))
                pack_checkpoint(untrained, policy.model.state_dict(), directory / "model")

        def probe(limit: int) -> dict[str, float]:
            sets = {name: screens.result() for name, screens in probes.items()}
            with source.pause:
                results = {name: probed(policy, questions, settings, each, limit) for name, each in sets.items()}
            return _written(directory, {"step": done, "samples": samples, "train_s": seconds()}, results)

        try:
            while done < options.steps and (not options.seconds or trained_s < options.seconds):
                waited_s = time.monotonic()
                batch = source.batch()
                waited_s = time.monotonic() - waited_s
                along = max(done / options.steps, trained_s / options.seconds if options.seconds else 0.0)
                rate = cosine(done, along, peak=options.learning_rate, warmup=options.warmup_steps)
                loss, count = screens_loss(policy, batch)
                norm = train_step(policy.model, optimizer, loss, learning_rate=rate, what=f"base step {done}")
                trained_s, count = _agreed(seconds(), count, policy.device)
                done, samples = done + 1, samples + count
                now_s = time.monotonic()
                if rank:
                    continue
                if now_s - last["log"] > _LOG_EVERY_S or done == options.steps:
                    speed = (samples - logged[1]) / (now_s - logged[2])
                    values = {"loss": float(loss.detach()), "grad_norm": norm, "learning_rate": rate}
                    values |= {"samples": samples, "samples_per_s": speed, "wait_s": waited_s, "s": seconds()}
                    log.write("base", done, values)
                    last["log"], logged = now_s, (done, samples, now_s)
                if now_s - last["probe"] > options.probe_every_s:
                    log.write("probe", done, probe(max(1, options.probe_questions // 4)))
                    last["probe"] = time.monotonic()
                if now_s - last["save"] > options.save_every_s:
                    save()
                    last["save"] = time.monotonic()
        except (KeyboardInterrupt, ProcessLost):
            # `timeout` sends its signal twice.
            _ignore_interruptions(running)
            save()
            raise
        save()
        if rank == 0:
            # The weights that are kept have 8 bits.
            policy.model.load_state_dict(read_packed(directory / "model"))
            log.write("probe", done, probe(options.probe_questions))


def write_untrained(settings: Settings, directory: Path, *, seed: int) -> None:
    """Write random weights, with a tokenizer of single letters: a word that was never seen is spelt like any other."""
    grammar, agent = settings.agent.make_grammar(), settings.agent
    space = CoordinateSpace.of(agent.units, image_px=settings.image_px, screen_px=settings.screen_px)
    acts: list[Action] = [
        Click(100, 100), Click(100, 100, button="right"), Click(100, 100, count=2), TypeText("-"), Done(""),
        Drag(100, 100, 200, 200), PressKeys(("ctrl", "alt", "delete")),
    ]  # fmt: skip
    texts = [("assistant", grammar.write([to_model_points(act, space)])) for act in acts]
    texts.append(("system", str(system_message(agent, space.picture()).parts[0])))
    pieces = [*constant_pieces(texts), *_PHRASES]
    write_checkpoint(directory, pieces=pieces, size=SIZES[settings.size], seed=seed)


def screens_loss(policy: Policy, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the mean loss of the replies' tokens, and the number of replies."""
    if policy.device.type == "cuda":
        for column in batch.values():
            column.record_stream(torch.cuda.current_stream())
    ids = batch["ids"].long()
    rows, columns = batch["is_trained"].nonzero(as_tuple=True)
    logits = policy.logits(
        ids, policy.patches(batch["frames"]), (rows, columns), branch_BT=batch["branch"], place_BT=batch["place"].long()
    )
    targets = ids[rows, columns]
    count = int((targets == policy.end_id).sum())
    # Not the mean of no token: a row of which no question fits has none.
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / max(1, len(targets)), count


# Probes


def probe_checkpoint(settings: Settings, packed: Path, directory: Path, *, seed: int, log: MetricsLog) -> None:
    """Probe kept weights without training, on the screens of a seed; write `directory/probes.json`.

    Raises:
        LearnError: The weights cannot be read, or screens cannot be drawn.
    """
    policy = Policy(
        unpack_checkpoint(packed, directory / "unpacked"), device=settings.torch_device, image_px=settings.image_px
    )
    questions = Questions(settings, policy.tokenizer, policy.processor)
    results = {
        name: probed(policy, questions, settings, _probe_set(settings, seed, *words), settings.base.probe_questions)
        for name, words in _PROBES.items()
    }
    log.write("probe", 0, _written(directory, {"checkpoint": str(packed), "seed": seed}, results))


def _written(
    directory: Path, facts: Mapping[str, Any], results: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> dict[str, float]:
    """Write the results of all probes, and return their rates."""
    write_atomically(directory / "probes.json", (json.dumps({**facts, **results}, indent=1) + "\n").encode())
    return {f"{name}/{kind}": found["rate"] for name, each in results.items() for kind, found in each.items()}


def _probe_set(settings: Settings, seed: int, *options: str) -> list[Screen]:
    """Return screens that are never trained, with all their questions."""
    source = read_screens(settings, _PROBE_SEED + seed, "--questions", "0", *options)
    screens = [next(source) for _ in range(settings.base.probe_screens)]
    source.close()  # type: ignore[attr-defined]
    return screens


def probed(
    policy: Policy, questions: Questions, settings: Settings, screens: Sequence[Screen], limit: int
) -> dict[str, dict[str, float]]:
    """Return, by the kind of question, how many greedy replies are right: `right` of `count`, the rate, its interval.

    Args:
        limit: Most questions of each kind.
    """
    asked: dict[SamplerRequest, Mapping[str, Any]] = {}
    counts: dict[str, int] = defaultdict(int)
    for number, (given, frame) in enumerate(screens):
        chosen = []
        for question in given:
            if counts[question["kind"]] < limit:
                counts[question["kind"]] += 1
                chosen.append(question)
        picture = torch.from_numpy(scaled(frame, settings).copy())
        for question in chosen:
            request = SamplerRequest(
                ids=questions.prompt(question),
                frame_HW3=picture,
                limit=settings.reply_tokens,
                temperature=0.0,
                picture=number,
            )
            asked[request] = question
    _answer(policy, [*asked])
    right: dict[str, int] = defaultdict(int)
    for request, asked_question in asked.items():
        right[asked_question["kind"]] += questions.is_right(asked_question, request.reply_ids)
    found = {}
    for kind, count in sorted(counts.items()):
        interval = wilson(right[kind], count)
        found[kind] = {"right": right[kind], "count": count, "rate": interval.mean}
        found[kind] |= {"low": interval.low, "high": interval.high}
    return found


def _answer(policy: Policy, requests: list[SamplerRequest]) -> None:
    """Reply to all requests."""
    policy.model.eval()
    generator = torch.Generator(device=policy.device).manual_seed(0)
    slots = min(_PROBE_SLOTS, len(requests))
    sampler = ReplySampler(policy, generator=generator, slot_count=slots)
    waiting = requests[::-1]
    with torch.compiler.set_stance("force_eager"):
        while waiting or sampler.running_count:
            # Many at once: reading one prompt costs a step of all.
            if waiting and sampler.free_count >= min(slots // 2 or 1, len(waiting)):
                taken = [waiting.pop() for _ in range(min(sampler.free_count, len(waiting)))]
                sampler.add(taken)
            sampler.step()
    policy.model.train()
