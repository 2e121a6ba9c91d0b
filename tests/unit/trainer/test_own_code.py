"""Own code that settings name is found and tried when they are read; what is wrong with it names setting and class."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cuaenv.agent_text.values import ParseError
from cuaenv.client import Action, Click, Done
from trainer.adapters.session import SessionSettings
from trainer.agent.grammars import Grammar, Intent, Picture, grammar, intent
from trainer.agent.prompts import prompt_hash
from trainer.agent.settings import AgentSettings
from trainer.agent.training import GroupConfig, TrainingConfig
from trainer.agent.types import Reply
from trainer.config import ExtensionError, InputError
from trainer.data.curriculum import curriculum_of
from trainer.learn.settings import Settings, fingerprint
from trainer.rewards.facts import Breakdown, EpisodeFacts
from trainer.rewards.recipes import recipe
from trainer.slime.config import SlimeConfig

HERE = __name__
OWN = "docs.examples.own"
FACTS = EpisodeFacts(task_id="t", task_score=1.0, turns=(), max_turns=3)


class Tensor:
    """Converts to a float, as tensors do, and is none."""

    def __float__(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Gives:
    """A reward of whatever it is given."""

    what: str

    def __call__(self, facts: EpisodeFacts) -> Any:
        if self.what == "raises":
            raise KeyError("turns")
        parts = {"task": 1.0}
        return {
            "none": None,
            "nan": float("nan"),
            "true": True,
            "text": "1.0",
            "tensor": Tensor(),
            "another score": Breakdown(recipe="x", total=1.0, task_score=0.25, parts=parts),
            "a number": 3,
        }[self.what]


@dataclass(frozen=True)
class NoCall:
    """A reward without a call."""


def two_arguments(facts: EpisodeFacts, more: int) -> float:
    return 1.0


def fails_for_failures(facts: EpisodeFacts) -> float:
    if facts.task_score == 0:
        raise ZeroDivisionError("no score")
    return 1.0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("none", "it returned None for trial/solved; return a finite number"),
        ("nan", "it returned nan"),
        ("true", "it returned True"),
        ("text", "it returned a str"),
        ("tensor", "it returned a Tensor"),
        ("another score", r"its task_score is 0.25, but that of trial/solved is 1.0"),
        ("raises", "it raised KeyError: 'turns'"),
    ],
)
def test_a_reward_of_a_wrong_type_is_refused_with_its_class_and_the_key(what: str, said: str) -> None:
    reward = {"recipe": f"{HERE}:Gives", "what": what}
    with pytest.raises(InputError, match=f"^envd.reward: reward {re.escape(HERE)}:Gives: {said}"):
        TrainingConfig.from_mapping({"hosts": ["h:1"], "reward": reward})
    with pytest.raises(InputError, match=f"reward {re.escape(HERE)}:Gives: {said}"):
        SessionSettings.connect(reward=reward)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "no_such_module:Reward",
            "importing no_such_module failed: .*; install it, or put its directory into PYTHONPATH",
        ),
        (
            "no_such_package.rewards:Reward",
            "importing no_such_package.rewards failed: .*; install it, or put its directory into PYTHONPATH",
        ),
        (f"{HERE}:Givess", "has no Givess; did you mean Gives?"),
        (f"{HERE}:NoCall", "it has no __call__"),
        (f"{HERE}:HERE", "is a str; name a class or a function"),
        (f"{HERE}:two_arguments", "it cannot be called as documented: missing a required argument: 'more'"),
        (f"{HERE}:fails_for_failures", "it raised ZeroDivisionError: no score"),
        (f"{HERE}:Gives", "what: missing; add it"),
        ("slime_osworld", r"no longer built in; copy docs/examples/own/slime_osworld.py"),
        ("modal_v10", r"no longer built in; .* modal_windows:Modal"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        TrainingConfig.from_mapping({"hosts": ["h:1"], "reward": name})


def test_a_module_that_fails_when_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"prompt fails_on_import:X: importing fails_on_import failed: ZeroDivisionError: [^;]*\Z"
    ):
        AgentSettings(prompt="fails_on_import:X")
    assert "fails_on_import" not in sys.modules
    (tmp_path / "needs_another.py").write_text("import no_such_module\n")
    with pytest.raises(InputError, match=r"importing needs_another failed: ModuleNotFoundError: [^;]*\Z"):
        AgentSettings(prompt="needs_another:X")


def test_a_number_is_one_part_and_a_function_takes_no_options() -> None:
    made = recipe(f"{HERE}:Gives", what="a number")(FACTS)
    assert made == Breakdown(recipe=f"{HERE}:Gives", total=3.0, task_score=1.0, parts={"Gives": 3.0})
    with pytest.raises(InputError, match="a function takes no options, but there is speed"):
        recipe(f"{OWN}.my_reward:halves", speed=1)


def test_an_own_reward_takes_options_and_ranks_an_escape_below_a_failure() -> None:
    reward = {"recipe": f"{OWN}.my_reward:Brisk", "per_turn": 0.5}
    config = TrainingConfig.from_mapping({"hosts": ["h:1"], "reward": reward})
    failed = EpisodeFacts(task_id="t", task_score=0.0, turns=(), max_turns=3)
    escaped = EpisodeFacts(task_id="t", task_score=0.0, turns=(), max_turns=3, guest_end_cause="PANIC")
    assert config.breakdown_of(escaped).total == config.breakdown_of(failed).total - 0.1
    assert SessionSettings.connect(reward=reward).reward_of(escaped) == config.breakdown_of(escaped)
    with pytest.raises(InputError, match=r"my_reward:Brisk.per_turm: unknown key; did you mean per_turn"):
        recipe(f"{OWN}.my_reward:Brisk", per_turm=0.5)


# Prompts


class NoTask:
    def system(self, *, shown: str, max_turns: int, instructions: str) -> str:
        return ""


class Silent(NoTask):
    def task(self, instruction: str) -> None:
        pass


class Positional(Silent):
    def system(self, instructions: str) -> str:  # type: ignore[override]
        return instructions


class NeedsMore(Silent):
    def __init__(self, style: str) -> None:
        self.style = style


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("terse", "unknown prompt 'terse'; choose one of standard, or your own as module:NAME"),
        (f"{HERE}:NoTask", "NoTask: it has no method task"),
        (f"{HERE}:Silent", "Silent.task: it returned a NoneType; return a text"),
        (f"{HERE}:Positional", "Positional.system: it cannot be called as documented: got an unexpected"),
        (f"{HERE}:NeedsMore", "NeedsMore: it cannot be called as documented: missing a required argument: 'style'"),
        (f"{HERE}:two_arguments", "two_arguments: is a function; name a class"),
    ],
)
def test_a_prompt_of_a_wrong_shape_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        AgentSettings.from_mapping({"prompt": name})


def test_the_digest_of_the_prompt_covers_own_texts_and_is_unchanged_without() -> None:
    own = AgentSettings(prompt=f"{OWN}.my_prompt:Terse")
    assert prompt_hash(own) != prompt_hash(AgentSettings())
    assert "prompt" in own.recorded()
    assert "prompt" not in AgentSettings().recorded()


# Grammars


class Base(Grammar):
    name = "own"

    def instructions(self, picture: Picture) -> str:
        return "Write anything."

    def read(self, text: str, picture: Picture) -> Sequence[Intent]:
        if text == "done":
            return [intent(Done(), "done", {})]
        if not text.startswith("click"):
            raise ParseError("write click")
        return [intent(Click(10, 20), "click", {})]

    def write(self, actions: Sequence[Action]) -> str:
        return "done" if isinstance(actions[0], Done) else "click"


class Unwritten(Grammar):
    name = "unwritten"

    def instructions(self, picture: Picture) -> str:
        return ""


class Crashes(Base):
    def read(self, text: str, picture: Picture) -> Sequence[Intent]:
        x, y = text.split()
        return [intent(Click(int(x), int(y)), "click", {})]


class CrashesLater(Base):
    def read(self, text: str, picture: Picture) -> Sequence[Intent]:
        if "%" in text:
            raise IndexError("no number")
        return super().read(text, picture)


class Misreads(Base):
    def write(self, actions: Sequence[Action]) -> str:
        return "done"


class NoTexts(Base):
    def instructions(self, picture: Picture) -> Any:
        return None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{HERE}:Unwritten", "Unwritten: it lacks read, write"),
        (f"{HERE}:NoTask", "NoTask: it is not a subclass of trainer.agent.grammars.Grammar"),
        (f"{HERE}:Crashes", r"Crashes.*ValueError.*it must raise ParseError for replies that do not follow"),
        (f"{HERE}:Misreads", r"Misreads: it writes Click.* as 'done', which it reads as \(Done"),
        (f"{HERE}:NoTexts", "NoTexts: instructions returned a NoneType"),
    ],
)
def test_a_grammar_of_a_wrong_shape_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        AgentSettings.from_mapping({"grammar": name})


def test_a_grammar_that_fails_later_is_an_error_of_the_run_not_of_the_reply() -> None:
    own = grammar(f"{HERE}:CrashesLater")
    assert own.parse("prose", Picture(100, 100)).error == "write click"
    with pytest.raises(ExtensionError, match=r"CrashesLater.read raised IndexError: no number"):
        own.parse("click %", Picture(100, 100))


def test_an_own_grammar_offers_tools_only_if_it_says_so() -> None:
    with pytest.raises(InputError, match="cannot express tools"):
        AgentSettings(grammar=f"{HERE}:Base", tools=("shell",))


# Branch policies and curricula


def without_reply(*, turns_since: int) -> bool:
    return True


def gives_a_number(*, turns_since: int, reply: Reply) -> Any:
    return 0.5


def of_a_history(history: Any) -> Any:
    return history.solve_rate


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("early", "unknown branch 'early'"),
        (f"{HERE}:without_reply", "it cannot be called as documented: got an unexpected keyword argument 'reply'"),
        (f"{HERE}:gives_a_number", "gives_a_number: it returned a float; return True or False"),
        (f"{HERE}:Gives", "Gives: is a class; name a function"),
    ],
)
def test_a_branch_policy_of_a_wrong_shape_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        GroupConfig.from_mapping({"hosts": ["h:1"], "branch": name})


def test_an_own_branch_policy_replaces_the_settings_of_the_standard_one() -> None:
    own = {"hosts": ["h:1"], "group": "tree", "branch": f"{OWN}.my_branch:early", "branch_every": 99}
    policy = GroupConfig.from_mapping(own).branch_policy
    reply = Reply(text="x", token_ids=(1, 2), log_probs=(-0.1, -0.2))
    assert [policy(turns_since=turns, reply=reply) for turns in (1, 2, 3)] == [False, False, True]
    surprising = Reply(text="x", token_ids=(1, 2), log_probs=(-0.1, -4.0))
    assert policy(turns_since=1, reply=surprising)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("solve-rate", "unknown curriculum 'solve-rate'; did you mean solve_rate"),
        (f"{HERE}:of_a_history", "it returned a NoneType; return True or False"),
        (f"{HERE}:two_arguments", "missing a required argument: 'more'"),
    ],
)
def test_a_curriculum_of_a_wrong_shape_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        SlimeConfig.from_mapping({"hosts": ["h:1"], "curriculum": name})
    with pytest.raises(InputError, match=said):
        curriculum_of(name)


def test_the_settings_of_a_learning_run_take_own_code_and_keep_their_fingerprint_without() -> None:
    own = Settings(prompt=f"{OWN}.my_prompt:Terse", grammar=f"{OWN}.my_grammar:Lines")
    assert (own.agent.prompt, own.agent.grammar) == (own.prompt, own.grammar)
    for stage in ("clone", "rl"):
        assert not {"prompt", "grammar"} & fingerprint(Settings(), stage=stage).keys()
        assert {"prompt", "grammar"} <= fingerprint(own, stage=stage).keys()


# The page


def test_the_page_shows_the_programs_which_are_short() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "make-it-yours.md").read_text(encoding="utf-8")
    programs = sorted((docs / "examples" / "own").glob("my_*.py"))
    assert len(programs) == 6
    for path in programs:
        code = path.read_text(encoding="utf-8")
        assert len(code.splitlines()) <= 30, path.name
        assert f"```python\n{code.strip()}\n```" in page, f"{path.name} differs from the page"
