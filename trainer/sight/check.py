"""Does the policy see its pixels? A check of an engine and a learner by code words that are drawn in pictures.

This file needs only what a framework that trains Qwen-VL models has: torch, numpy and Pillow. It may be copied.

A few episodes are played greedily through the framework's own rollout. Each turn shows one new picture of a code word;
nothing else tells the turns apart. Two episodes have the same pictures: their difference is the engine's noise. In each
other one, the picture of one turn is exchanged, which must change the reply's log-probabilities on both sides. With
unchanged pictures both sides must agree, and the learner's batch must hold the drawn pixels.

Without a learner, changes by which an engine loses nothing stay unseen: half the brightness, inverted or grey pictures,
pictures in another order. Only the log-probabilities of the same tokens by other means show them.

```python
plan = SightPlan.draw(turns=3, size_px=(640, 384))
episodes = [play(pictures) for pictures in plan.episodes]    # the framework's rollout: a `SampledReply` for each reply
print(compare(plan, episodes, learner, patches := Patches.of(processor.image_processor)))
given_pictures(plan, episodes, patches).save("sight.png")
```

A greedy log-probability is the maximum of a distribution, and the maxima of two distributions differ by at most their
greatest difference. So replies are compared up to and including their first different token.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

#: Difference of log-probabilities, in nats, that arithmetic in half precision may cause between engine and learner.
_TOLERANCE = 0.05
#: Pixels that are seen change log-probabilities by more. Lost ones change nothing but what a repeated episode does:
#: small random models change by 0.04, and a trained one by whole nats.
_LEAST_CHANGE = 0.01
#: A difference counts as caused by pixels if it is this many times that of a repeated episode.
_NOISE_FACTOR = 4.0
#: The gap between engine and learner is at most this share of what exchanging a picture changes.
_GAP_SHARE = 0.25
#: Mean difference of 8-bit values between the picture drawn and that of the learner: more than half precision causes.
_PIXEL_LIMIT = 4.0
_LETTERS = "ACDEFHJKLMNPRTUVWXY"
_WORD_LETTERS = 5
#: Of a plan: each word needs letters of its own, and up to four pictures are exchanged.
MOST_TURNS = len(_LETTERS) - 4


@dataclass(frozen=True)
class SampledReply:
    """One reply of an episode, as engine and learner have it."""

    tokens: Sequence[int]
    """The learner's row with this reply. Turns of one row share it."""
    start: int
    """Position of the reply in the row."""
    log_probs: Sequence[float]
    """The engine's log-probabilities, one for each token of the reply that it sampled greedily."""
    inputs: Mapping[str, Any]
    """The row's image inputs for the learner's model, such as `pixel_values` and `image_grid_thw`; empty without."""
    image: int
    """Index of the turn's own picture among those of the row."""
    text: str = ""
    """The reply."""


def turns_of_row(
    tokens: Sequence[int],
    mask: Sequence[int],
    log_probs: Sequence[float | None],
    inputs: Mapping[str, Any] | None,
    *,
    image_id: int,
    decode: Callable[[Sequence[int]], str],
) -> list[SampledReply]:
    """Return the turns of a row.

    Args:
        tokens: The row, with one placeholder for each image token.
        mask: For the last tokens: 1 for those of replies.
        log_probs: The engine's, for the same tokens; None where a reply was continued by other means.
        inputs: The row's image inputs.
        image_id: The placeholder.
        decode: Returns the text of tokens.
    """
    turns, at, first = list[SampledReply](), 0, len(tokens) - len(mask)
    for is_reply, run in groupby(mask):
        start, end = first + at, at + len(list(run))
        if is_reply:
            sampled = [each for each in takewhile(lambda each: each is not None, log_probs[at:end]) if each is not None]
            image = sum(token == image_id for token, _ in groupby(tokens[:start])) - 1
            text = decode(tokens[start : start + len(sampled)])
            turns.append(SampledReply(tokens, start, sampled, inputs or {}, image, text))
        at = end
    return turns


Episode = Sequence[SampledReply]
Learner = Callable[[Sequence[int], Mapping[str, Any]], Sequence[float]]
"""The learner's forward pass on a row and its image inputs: entry i is the log-probability of token i given those
before it; the first entry has no meaning."""


@dataclass(frozen=True)
class SightPlan:
    """The code words and pictures of all episodes."""

    words: Sequence[Sequence[str]]
    """The word of each turn, by episode: the first two are equal, each other one differs from them in one turn."""
    episodes: Sequence[Sequence[Image.Image]]
    exchanged: Sequence[int]
    """Turn, from 0, whose picture differs in each episode after the first two."""

    @staticmethod
    def draw(*, turns: int, size_px: tuple[int, int]) -> "SightPlan":
        """Draw words that differ in every letter place, each in its own colours.

        Pictures of the first three turns and of the last one are exchanged: an engine that reads at most so many
        pictures of a request lacks the last one.

        Raises:
            ValueError: More turns than `MOST_TURNS`.
        """
        rng = random.Random(0)  # noqa: S311 -- not for secrets
        exchanged = sorted({*range(min(turns, 3)), turns - 1})
        columns = [rng.sample(_LETTERS, turns + len(exchanged)) for _ in range(_WORD_LETTERS)]
        words = ["".join(letters) for letters in zip(*columns, strict=True)]
        pictures = [_drawn(word, size_px, rng) for word in words]
        shown = [list(range(turns)), list(range(turns))]
        for other, turn in enumerate(exchanged, start=turns):
            shown.append([other if number == turn else number for number in range(turns)])
        return SightPlan(
            exchanged=exchanged,
            words=[[words[number] for number in each] for each in shown],
            episodes=[[pictures[number] for number in each] for each in shown],
        )


@dataclass(frozen=True)
class Patches:
    """How an image processor of the Qwen-VL kind arranges and scales pixels."""

    patch_px: int = 16
    merge: int = 2
    temporal: int = 2
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)

    @staticmethod
    def of(processor: Any) -> "Patches":
        """Return those of a transformers image processor."""
        names = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
        return Patches(*(getattr(processor, name) for name in names))

    def pictures(self, inputs: Mapping[str, Any]) -> list[Image.Image]:
        """Return the pictures in image inputs: patches put back together, scaled to 8-bit values."""
        if not has_pixels(inputs):
            return []
        found, at, merge, side = [], 0, self.merge, self.patch_px
        values = inputs["pixel_values"].detach().float().cpu().numpy()
        for _, rows, columns in inputs["image_grid_thw"].tolist():
            patches = values[at : at + rows * columns]
            at += rows * columns
            # The first of the equal frames of a still picture.
            shape = (rows // merge, columns // merge, merge, merge, 3, self.temporal, side, side)
            pixels_HWC = patches.reshape(shape)[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
            pixels_HWC = pixels_HWC.reshape(rows * side, columns * side, 3) * self.std + self.mean
            found.append(Image.fromarray(np.clip(pixels_HWC * 255 + 0.5, 0, 255).astype(np.uint8)))
        return found


@dataclass(frozen=True)
class Fault:
    """A fault."""

    turn: int
    """The turn, from 1."""
    side: Literal["engine", "learner", "engine and learner"]
    problem: str
    look_at: str

    def __str__(self) -> str:
        return f"turn {self.turn}, {self.side}: {self.problem}; look at {self.look_at}"


@dataclass
class Report:
    """The figures of each turn in nats, and what is wrong."""

    noise: float = 0.0
    """Greatest difference between the engine's log-probabilities of two equal episodes."""
    engine_change: list[float | None] = field(default_factory=list)
    """The engine's greatest difference in each turn when the turn's picture is exchanged; None if it is not exchanged,
    or not comparable."""
    learner_change: list[float | None] = field(default_factory=list)
    """The learner's mean difference in each turn when the turn's picture is exchanged; None if it is not exchanged, or
    without a learner."""
    gap: list[float | None] = field(default_factory=list)
    """Mean difference in each such turn between engine and learner with unchanged pictures; None without a learner."""
    read_count: int = 0
    """Replies that have their turn's own word."""
    findings: list[Fault] = field(default_factory=list)

    def add(self, turn: int, side: Literal["engine", "learner", "engine and learner"], problem: str, look: str) -> None:
        """Add a finding about a turn that counts from 0."""
        self.findings.append(Fault(turn + 1, side, problem, look))

    def __str__(self) -> str:
        lines = [
            f"turn {turn + 1}: another picture changes the engine by {_nats(self.engine_change[turn])}, the learner by"
            f" {_nats(self.learner_change[turn])}; engine and learner differ by {_nats(self.gap[turn])}"
            for turn in range(len(self.engine_change))
        ]
        lines.append(f"repeated episodes differ by {_nats(self.noise)}; {self.read_count} replies have their word")
        return "\n".join([*lines, *(f"FAULT {each}" for each in self.findings)])


def compare(plan: SightPlan, episodes: Sequence[Episode], learner: Learner | None, patches: Patches) -> Report:
    """Return what engine and learner see.

    Args:
        plan: The plan.
        episodes: The episodes of the plan, in its order.
        learner: The learner; None to examine only the engine and the batch.
        patches: Arrangement of `pixel_values`.

    Raises:
        ValueError: An episode has another number of turns than the plan.
    """
    for number, episode in enumerate(episodes):
        if len(episode) != len(plan.words[0]) or any(not turn.log_probs for turn in episode):
            what = f"{len(episode)} replies with tokens instead of {len(plan.words[0])}"
            raise ValueError(f"episode {number}: it has {what}; raise its budgets of tokens, images and turns")
    report = Report()
    base, again, *others = episodes
    exchanged = {turn: other[turn] for turn, other in zip(plan.exchanged, others, strict=True)}
    repeats = [_difference(base[turn], again[turn]) for turn in range(len(plan.words[0]))]
    report.noise = max((each for each in repeats if each is not None), default=0.0)
    for turn in range(len(plan.words[0])):
        _engine(report, turn, base[turn], exchanged.get(turn))
        _answer(report, plan, turn, base[turn])
        _batch(report, plan, turn, base[turn], patches)
        _learner(report, turn, base[turn], exchanged.get(turn), learner)
    return report


def _engine(report: Report, turn: int, base: SampledReply, exchanged: SampledReply | None) -> None:
    change = _difference(base, exchanged) if exchanged else None
    report.engine_change.append(change)
    limit = max(_LEAST_CHANGE, _NOISE_FACTOR * report.noise)
    if exchanged is None:
        return
    if change is None:
        report.add(turn, "engine", "earlier replies differ although nothing changed", "how it samples greedily")
    elif change <= limit:
        what = f"another picture changes its log-probabilities by {_nats(change)}, not above {_nats(limit)}"
        report.add(turn, "engine", what, "the images of its request, placeholders in its prompt, and its prefix cache")


def _answer(report: Report, plan: SightPlan, turn: int, base: SampledReply) -> None:
    own, text = plan.words[0][turn], base.text.upper()
    if own in text:
        report.read_count += 1
        return
    for earlier, word in enumerate(plan.words[0][:turn]):
        if word in text:
            what = f"it answers with the word of turn {earlier + 1}"
            report.add(turn, "engine", what, "which pictures the request of this turn has, and their order")


def _batch(report: Report, plan: SightPlan, turn: int, base: SampledReply, patches: Patches) -> None:
    """Compare the pictures in the learner's batch with those that were drawn."""
    given = patches.pictures(base.inputs)
    if not 0 <= base.image < len(given):
        what = f"its row has {len(given)} pictures, and none for this turn"
        report.add(turn, "learner", what, "what turns rollouts into a batch, and what the batch passes through")
        return
    distances = [_distance(given[base.image], drawn) for drawn in plan.episodes[0]]
    nearest = min(range(len(distances)), key=distances.__getitem__)
    if nearest != turn:
        report.add(
            turn, "learner", f"its row has the picture of turn {nearest + 1}", "the order of pictures in the row"
        )
    elif distances[turn] > _PIXEL_LIMIT:
        what = f"its pixels differ from those drawn by {distances[turn]:.0f} of 255 on average"
        report.add(turn, "learner", what, "colour channels, scaling and compression before its image processor")


def _learner(
    report: Report, turn: int, base: SampledReply, exchanged: SampledReply | None, learner: Learner | None
) -> None:
    change = gap = None
    if learner is not None and exchanged is not None:
        mine = _of_reply(learner(base.tokens, base.inputs), base)
        gap = _mean_difference(mine, base.log_probs)
        other = exchange(base.inputs, base.image, exchanged.inputs, exchanged.image)
        change = _mean_difference(_of_reply(learner(base.tokens, other), base), mine)
        if change <= min(_LEAST_CHANGE, gap):
            what = f"another picture changes its log-probabilities by {_nats(change)}"
            report.add(turn, "learner", what, "whether its forward pass gets pixel_values and image_grid_thw")
        limit = max(_TOLERANCE, change * _GAP_SHARE)
        if gap > limit:
            what = f"their log-probabilities of the same pictures differ by {_nats(gap)}, more than {_nats(limit)}"
            report.add(turn, "engine and learner", what, "pictures, tokens and positions that only one of them has")
    report.learner_change.append(change)
    report.gap.append(gap)


def has_pixels(inputs: Mapping[str, Any]) -> bool:
    """Return whether image inputs have patches and their grids."""
    return inputs.get("pixel_values") is not None and inputs.get("image_grid_thw") is not None


def exchange(inputs: Mapping[str, Any], image: int, others: Mapping[str, Any], other: int) -> Mapping[str, Any]:
    """Return image inputs with the patches of one picture replaced by those of a picture of the same size."""
    if not has_pixels(inputs) or not has_pixels(others):
        return inputs
    place, source = _patches_of(inputs, image), _patches_of(others, other)
    pixel_values = inputs["pixel_values"].clone()
    if pixel_values[place].shape == others["pixel_values"][source].shape:
        pixel_values[place] = others["pixel_values"][source]
    return {**inputs, "pixel_values": pixel_values}


def _patches_of(inputs: Mapping[str, Any], image: int) -> slice:
    counts = [math.prod(grid) for grid in inputs["image_grid_thw"].tolist()]
    return slice(sum(counts[:image]), sum(counts[: image + 1]))


def _difference(one: SampledReply, other: SampledReply) -> float | None:
    """Return the greatest difference of greedy log-probabilities; None if the replies followed different ones."""
    if list(one.tokens[: one.start]) != list(other.tokens[: other.start]):
        return None
    greatest = 0.0
    for place, (mine, its) in enumerate(zip(one.log_probs, other.log_probs, strict=False)):
        greatest = max(greatest, abs(mine - its))
        if one.tokens[one.start + place] != other.tokens[other.start + place]:
            break
    return greatest


def _of_reply(log_probs: Sequence[float], turn: SampledReply) -> Sequence[float]:
    return log_probs[turn.start : turn.start + len(turn.log_probs)]


def _mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(mine - its) for mine, its in zip(one, other, strict=True)) / len(one)


def _distance(one: Image.Image, other: Image.Image) -> float:
    pixels = [np.asarray(each.convert("RGB").resize(other.size), np.int16) for each in (one, other)]
    return float(np.abs(pixels[0] - pixels[1]).mean())


def _drawn(word: str, size_px: tuple[int, int], rng: random.Random) -> Image.Image:
    dark, light = (tuple(rng.randrange(low, low + 96) for _ in range(3)) for low in (0, 160))
    paper, ink = (dark, light) if rng.random() < 0.5 else (light, dark)
    picture = Image.new("RGB", size_px, paper)
    width, height = size_px
    font = ImageFont.load_default(min(width / (0.8 * len(word)), 0.6 * height))
    ImageDraw.Draw(picture).text((width / 2, height / 2), word, ink, font, anchor="mm")
    return picture


def given_pictures(plan: SightPlan, episodes: Sequence[Episode], patches: Patches) -> Image.Image:
    """Return one picture: by turn, the picture drawn, and under it the one that the learner is given."""
    line, (width, height) = 14, plan.episodes[0][0].size
    sheet = Image.new("RGB", (len(plan.words[0]) * (width + 8) + 8, 2 * (height + line) + 12), "white")
    draw = ImageDraw.Draw(sheet)
    for turn, drawn in enumerate(plan.episodes[0]):
        x = 8 + turn * (width + 8)
        given = patches.pictures(episodes[0][turn].inputs)
        image = episodes[0][turn].image
        shown = given[image] if 0 <= image < len(given) else None
        for row, (name, picture) in enumerate((("drawn", drawn), ("given to the learner", shown))):
            y = 4 + row * (height + line + 4)
            draw.text((x, y), f"turn {turn + 1}, {name}{'' if picture else ': nothing'}", "black")
            if picture:
                sheet.paste(picture.resize((width, height)), (x, y + line))
    return sheet


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} nats"
