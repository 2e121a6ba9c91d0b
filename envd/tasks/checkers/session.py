"""Checkers of the user's session: the clipboard, the screen, and the agent's answer."""

import re
import unicodedata
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from cuaenv.actions import Done
from cuaenv.results import CommandResult
from envd.base.errors import GuestError
from envd.desktop.a11y import MAX_NAME_CHARS, MAX_VALUE_CHARS, is_cut
from envd.desktop.observation import A11yElement, A11yElements, Encoding, ObservationOptions
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import QUERY_TIMEOUT_S, GuestInspector, LeafChecker
from envd.tasks.fields import Regex
from envd.tasks.text import CheckOutcome, TextExpectation, judge_text, quote

#: What xclip reports if nothing is on the clipboard, or something other than text.
_NO_TEXT = re.compile(rb"target \S+ not available|no owner for the")

#: What separates candidates or denies one, in plain text.
_OTHERS = re.compile(
    r"\b(?:or|and|nor|either|neither|not|never|cannot)\b|n['’]t\b|[,;/|&•·、\n-\r\x1c-\x1e\x85\u2028\u2029]"
    r"|[.?!。][^\w.?!。]*\w",
    re.IGNORECASE,
)
#: What makes a number another one, before it.
_SIGN = re.compile(r"(?:^|\W)[-−–]$|[<>≤≥≠]\s*$")


class _OneText(LeafChecker, TextExpectation):
    """A text of which there is one, and which is empty at the start."""

    @model_validator(mode="after")
    def _rejects_empty(self) -> Self:
        if self.accepts_nothing():
            raise ValueError("an empty text must not be right: an agent that does nothing would score")
        return self

    @property
    def subject(self) -> str:
        """Empty: there is only one."""
        return ""

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- in each
        """See `LeafChecker`: a program of the session sends the clipboard, and the answer needs no guest."""
        return True


class Clipboard(_OneText):
    """The text on the clipboard."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})
    runs_before_start: ClassVar[bool] = True

    kind: Literal["clipboard"]

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        # As the user: the clipboard belongs to the session, and root has no access to it.
        argv = ("xclip", "-selection", "clipboard", "-o")
        result = await inspector.desktop.run(argv, timeout_s=QUERY_TIMEOUT_S)
        return await inspector.judge(judge_clipboard, result, self)


class AgentAnswer(_OneText):
    """The answer that the agent gave with `Done`, without surrounding white space."""

    # Without an agent no answer exists.
    runs_before_start: ClassVar[bool] = False

    kind: Literal["answer"]
    hedged: Literal["refuse", "accept"] = "refuse"
    """`refuse`: around a text that it `contains`, or in free text that `matches`, nothing may look like another answer:
    another number if a number is expected, a list, "or", a second sentence."""

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        return await inspector.judge(judge_answer, inspector.last_action, self)


class OnScreen(LeafChecker):
    """Whether an element is on the screen, by the accessibility tree. It must match all given fields."""

    # An accessibility tree takes seconds in an emulated guest.
    runs_before_start: ClassVar[bool] = False

    kind: Literal["on_screen"]
    role: str = ""
    """Its role, such as `push-button`; Windows guests have the roles of Linux guests."""
    named: Regex = ""
    """Regular expression, searched for in its name."""
    value: Regex = ""
    """Regular expression, searched for in its text or number."""
    states: tuple[str, ...] = ()
    """It must have all of these, such as `checked`, `focused` and `selected`."""
    present: bool = True

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not (self.role or self.named or self.value):
            raise ValueError("give role, named, value or several of them")
        return self

    @property
    def subject(self) -> str:
        """The expected name, value or role."""
        return self.named or self.value or self.role

    def asks_session(self, os: GuestOs) -> bool:  # noqa: ARG002 -- in each
        """See `LeafChecker`: programs answer for their elements."""
        return True

    async def check(self, inspector: GuestInspector) -> CheckOutcome:
        options = ObservationOptions(encoding=Encoding.NONE, include_a11y_elements=True)
        seen = await inspector.desktop.observe(options, refresh=True)
        if seen.a11y_elements is None:
            raise GuestError("the accessibility tree is missing from the observation")
        return await inspector.judge(judge_screen, seen.a11y_elements, self)


def judge_screen(seen: A11yElements, checker: OnScreen) -> CheckOutcome:
    """Score the elements on the screen.

    Raises:
        GuestError: None matches, and the list or the text of an element is incomplete.
    """
    matching = [element for element in seen.items if _matches(element, checker)]
    if matching:
        shown = ", ".join(f"{element.role} {quote(element.name)}" for element in matching[:3])
        return CheckOutcome(float(checker.present), f"{len(matching)} on the screen: {shown}")
    if seen.is_cut or seen.left_out_count:
        raise GuestError(
            f"the accessibility tree is incomplete: no match among its {len(seen.items)} elements, and there are more"
        )
    for element in seen.items:
        if _could_match(element, checker):
            raise GuestError(f"the text of {element.role} {quote(element.name)} is cut, and no complete text matches")
    return CheckOutcome(float(not checker.present), f"not among the {len(seen.items)} elements on the screen")


def _matches(element: A11yElement, checker: OnScreen) -> bool:
    return (
        _is_of_kind(element, checker)
        and re.search(checker.named, element.name) is not None
        and re.search(checker.value, element.value) is not None
    )


def _could_match(element: A11yElement, checker: OnScreen) -> bool:
    """Whether an element that does not match could match with its complete texts."""
    texts = ((checker.named, element.name, MAX_NAME_CHARS), (checker.value, element.value, MAX_VALUE_CHARS))
    return _is_of_kind(element, checker) and all(
        is_cut(text, limit) or re.search(pattern, text) is not None for pattern, text, limit in texts
    )


def _is_of_kind(element: A11yElement, checker: OnScreen) -> bool:
    return checker.role in ("", element.role) and set(checker.states) <= set(element.states)


def judge_clipboard(result: CommandResult, checker: Clipboard) -> CheckOutcome:
    """Score the output of xclip, which fails if the clipboard holds no text.

    Raises:
        GuestError: It failed for another reason.
    """
    if result.exit_code != 0 and not _NO_TEXT.search(result.stderr):
        raise GuestError(f"xclip cannot read the clipboard: exit code {result.exit_code}: {quote(result.stderr)}")
    if result.exit_code != 0 or not result.stdout:
        return CheckOutcome(0.0, "no text is on the clipboard")
    return judge_text(result.stdout.decode(errors="replace"), checker)


def judge_answer(last_action: Done | None, checker: AgentAnswer) -> CheckOutcome:
    if last_action is None or not last_action.answer.strip():
        return CheckOutcome(0.0, "the agent gave no answer")
    answer = last_action.answer.strip()
    outcome = judge_text(answer, checker)
    if outcome.score and checker.hedged == "refuse" and _is_hedged(answer, checker):
        return CheckOutcome(0.0, f"{quote(answer)} names more than one answer")
    return outcome


def _is_hedged(answer: str, checker: AgentAnswer) -> bool:
    """Whether an accepted answer may name candidates besides the right one: it has a sign of that in free text."""
    if checker.contains is not None:
        # Each side of the expected text: where a word or a number continues, it is another one.
        before, found, after = answer.casefold().partition(checker.contains.casefold())
        before, after = _plain(before), _plain(after)
        has_more = bool(re.search(r"\w$", before) or re.match(r"[\w\u0300-\u036f]", after))
        is_other = _SIGN.search(before) is not None or any(map(str.isnumeric, before + after))
        return (
            has_more or (is_other and any(map(str.isdigit, found))) or _OTHERS.search(f"{before} {after}") is not None
        )
    if checker.matches is None or judge_text(f"{answer} or {answer}", checker).score < 1:
        return False
    expected_count, count = (len(re.findall(r"\d+", text)) for text in (checker.matches, _plain(answer)))
    return 0 < expected_count < count or _OTHERS.search(_plain(answer)) is not None


def _plain(text: str) -> str:
    """Return a text without invisible characters, and with the common form of each character."""
    return "".join(each for each in unicodedata.normalize("NFKC", text) if unicodedata.category(each) != "Cf")
