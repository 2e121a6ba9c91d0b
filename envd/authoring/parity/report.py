"""Compare the results of both sides: agreement, Cohen's kappa, disagreements, and what differs on the screens."""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from envd.authoring.parity.playing import PlayedScript, stored_screen
from envd.authoring.parity.screens import NAMED_CAUSES, Box, compare
from envd.authoring.results import embedded_png, page

#: Scores that differ by less are equal: they may be sums of fractions.
_SAME_SCORE = 1e-9
_MOST_SHOWN_BOXES = 12
_KAPPA_UNDEFINED = "undefined: all scores are equal"


def cohens_kappa(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Cohen's kappa of pairs of scores: agreement beyond that by chance, at most 1. Each score is a category.

    None if it is undefined: there is no pair, or both sides always give one and the same score, so that chance alone
    agrees always.
    """
    scores = [(round(left, 9), round(right, 9)) for left, right in pairs]
    count = len(scores)
    agreed = sum(left == right for left, right in scores)
    lefts, rights = Counter(left for left, _ in scores), Counter(right for _, right in scores)
    # Times count squared, so that the comparison is exact.
    by_chance = sum(lefts[score] * rights[score] for score in lefts)
    return (count * agreed - by_chance) / (count**2 - by_chance) if by_chance != count**2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The results of one script on both sides."""

    task_id: str
    script: str
    left: PlayedScript | None
    """None if it was not played yet."""
    right: PlayedScript | None
    differences: Mapping[str, Sequence[tuple[Box, str]]]
    """Where the first and the last screens differ; without those that were not seen on both sides."""

    @property
    def scores(self) -> tuple[float, float] | None:
        """The scores; None if there are not two."""
        left, right = (each.score if each else None for each in (self.left, self.right))
        return None if left is None or right is None else (left, right)

    @property
    def is_void(self) -> bool:
        """Whether a side that was played has no score."""
        return any(each is not None and each.score is None for each in (self.left, self.right))

    @property
    def agrees(self) -> bool:
        return self.scores is not None and abs(self.scores[0] - self.scores[1]) < _SAME_SCORE

    @property
    def kind(self) -> str:
        return self.script.partition(" ")[0]


def pair_up(lefts: Iterable[PlayedScript], rights: Iterable[PlayedScript], screens: Path) -> Sequence[Pair]:
    """Return the pairs of both sides' results, in the order of the left ones."""
    by_script = [{(each.task_id, each.script): each for each in side} for side in (lefts, rights)]
    pairs = []
    for task_id, script in dict.fromkeys([*by_script[0], *by_script[1]]):
        left, right = (side.get((task_id, script)) for side in by_script)
        differences = _compared(left, right, screens) if left and right else {}
        pairs.append(Pair(task_id=task_id, script=script, left=left, right=right, differences=differences))
    return pairs


def _compared(left: PlayedScript, right: PlayedScript, screens: Path) -> dict[str, Sequence[tuple[Box, str]]]:
    found: dict[str, Sequence[tuple[Box, str]]] = {}
    for when, *names in zip(("first", "last"), left.screens, right.screens, strict=False):
        seen = [stored_screen(screens, name) for name in names]
        if all(seen):
            found[when] = compare(*seen)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """The results of a comparison."""

    left: str
    """What the left side is: a hypervisor's URI or an address."""
    right: str
    pairs: Sequence[Pair]
    screens: Path

    @property
    def scored(self) -> list[Pair]:
        return [each for each in self.pairs if each.scores]

    @property
    def disagreements(self) -> list[Pair]:
        return [each for each in self.scored if not each.agrees]

    @property
    def void(self) -> list[Pair]:
        return [each for each in self.pairs if each.is_void]

    @property
    def passed(self) -> bool:
        """Whether both sides gave every script the same score; of one side alone, whether it gave any."""
        return bool(self.pairs) and not self.void and (not self.right or all(each.agrees for each in self.pairs))

    def as_json(self) -> dict[str, object]:
        return {
            "left": self.left,
            "right": self.right,
            **self._figures(self.pairs),
            "kinds": {kind: self._figures(pairs) for kind, pairs in self._kinds().items()},
            "screens": {when: self._screen_counts(when) for when in ("first", "last")},
            "disagreements": [_plain(each) for each in self.disagreements],
            "void_scripts": [_plain(each) for each in self.void],
        }

    def print(self, console: Console) -> None:
        """Print a table of tasks with unlike or missing scores, then agreement by kind of script."""
        if self.disagreements or self.void:
            table = Table("task", "script", "left", "right", "left: evidence", "right: evidence", box=None)
            for each in [*self.disagreements, *self.void]:
                sides = (each.left, each.right)
                cells = (each.task_id, each.script, *map(_score, sides), *(_detail(side)[:160] for side in sides))
                table.add_row(*map(escape, cells))
            console.print(table)
        table = Table(*_HEADINGS, box=None, pad_edge=False)
        for row in self._rows():
            table.add_row(*map(escape, map(str, row)))
        console.print(table)
        for when in ("first", "last"):
            counts = self._screen_counts(when)
            console.print(
                f"{when} screens: {counts['equal']} of {counts['compared']} equal, {counts['named']} with differences"
                f" of named causes only ({', '.join(sorted(NAMED_CAUSES))}), {counts['other']} with others",
                markup=False,
                soft_wrap=True,
            )

    def page(self) -> str:
        """Return the report as one HTML page, with pictures of every disagreement. Texts of guests are escaped."""
        differing = [
            each for each in self.scored if each.agrees and _causes(each.differences.get("last", ())) == "other"
        ]
        found = [*self.disagreements, *self.void, *differing]
        title = f"Parity: {self.left} against {self.right}"
        return page(title, _HEADINGS, self._rows(), [self._summary(), *map(self._section, found)])

    def _summary(self) -> str:
        lines = []
        for when in ("first", "last"):
            counts = self._screen_counts(when)
            lines.append(f"<li>{when} screens: {', '.join(f'{count} {name}' for name, count in counts.items())}</li>")
        return f"<ul>{''.join(lines)}</ul>"

    def _section(self, pair: Pair) -> str:
        sides = []
        for name, side in (("left", pair.left), ("right", pair.right)):
            picture = (
                embedded_png(stored_screen(self.screens, side.screens[-1]), f"last screen, {name}")
                if side and side.screens
                else ""
            )
            sides.append(f"<h3>{name}: {_score(side)}</h3><p>{html.escape(_detail(side))}</p>{picture}")
        boxes = pair.differences.get("last", ())
        shown = "; ".join(f"{list(box)} {cause}".strip() for box, cause in boxes[:_MOST_SHOWN_BOXES])
        differences = f"<p>{len(boxes)} differences on the last screen: {shown}</p>" if boxes else ""
        state = "void" if pair.is_void else "scores agree, screens differ" if pair.agrees else "disagreement"
        heading = f"{html.escape(pair.task_id)}: {html.escape(pair.script)}"
        return f"<section><h2>{heading}</h2><p>{state}</p>{differences}{''.join(sides)}</section>"

    def _kinds(self) -> dict[str, list[Pair]]:
        kinds: dict[str, list[Pair]] = {}
        for each in self.pairs:
            kinds.setdefault(each.kind, []).append(each)
        return kinds

    def _figures(self, pairs: Sequence[Pair]) -> dict[str, object]:
        scored = [each.scores for each in pairs if each.scores]
        agreed = sum(each.agrees for each in pairs)
        return {
            "scripts": len(pairs),
            "scored": len(scored),
            "agreed": agreed,
            "void": sum(each.is_void for each in pairs),
            "not_played": sum(None in (each.left, each.right) for each in pairs),
            "agreement": agreed / len(scored) if scored else None,
            "kappa": cohens_kappa(scored),
        }

    def _rows(self) -> list[tuple[object, ...]]:
        rows = []
        for kind, pairs in [*self._kinds().items(), ("all", self.pairs)]:
            figures = self._figures(pairs)
            agreement, kappa = figures["agreement"], figures["kappa"]
            shown = "-" if agreement is None else f"{agreement:.1%}"
            undefined = _KAPPA_UNDEFINED if figures["scored"] else "-"
            shown_kappa = undefined if kappa is None else f"{kappa:.3f}"
            counts = (figures[name] for name in ("scripts", "scored", "agreed", "void", "not_played"))
            rows.append((kind, *counts, shown, shown_kappa))
        return rows

    def _screen_counts(self, when: str) -> dict[str, int]:
        """Count the pairs by what differs on their screens."""
        seen = [each.differences[when] for each in self.pairs if when in each.differences]
        causes = Counter(map(_causes, seen))
        return {"compared": len(seen), **{name: causes[name] for name in ("equal", "named", "other")}}


_HEADINGS = ("scripts", "played", "scored", "agreed", "void", "not played", "agreement", "Cohen's kappa")


def _causes(differences: Sequence[tuple[Box, str]]) -> str:
    if not differences:
        return "equal"
    return "named" if all(cause in NAMED_CAUSES for _, cause in differences) else "other"


def _score(result: PlayedScript | None) -> str:
    if result is None:
        return "not played"
    return "void" if result.score is None else f"{result.score:g}"


def _detail(result: PlayedScript | None) -> str:
    return result.detail if result else ""


def _plain(pair: Pair) -> dict[str, object]:
    sides = {
        name: side.model_dump(exclude={"side"}) if side else None
        for name, side in (("left", pair.left), ("right", pair.right))
    }
    causes = {when: Counter(cause or "other" for _, cause in found) for when, found in pair.differences.items()}
    return {"task_id": pair.task_id, "script": pair.script, **sides, "differences": causes}
