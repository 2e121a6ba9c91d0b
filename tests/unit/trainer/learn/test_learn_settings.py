"""Settings of `trainer learn`, and the files of the ablations."""

from pathlib import Path

import pytest

from envd.drawn.suite import DRAWN
from envd.tasks.templates import split_of
from tests.tools.learning.arms import generate
from trainer.config import InputError
from trainer.learn import LearnError
from trainer.learn.settings import SMOKE, Settings, fingerprint

CHECKOUT = Path(__file__).parents[4]
FILES = sorted(
    path for name in ("docs/learning", "tests/tools/learning") for path in (CHECKOUT / name / "settings").glob("*.yaml")
)
BASELINE = next(path for path in FILES if path.stem == "baseline")
GENERATE = f"{generate.__module__}.{generate.__name__}"
OTHER_BASES = [BASELINE.with_name(f"{name}.yaml") for name in ("escape", "pages", "reading")]


def changed(**rl: object) -> Settings:
    return SMOKE.model_copy(update={"rl": SMOKE.rl.model_copy(update=rl)})


def test_more_updates_are_the_same_run_and_another_rate_is_not() -> None:
    same, other = changed(updates=50, env_steps=9), changed(learning_rate=1.0)
    assert fingerprint(same, stage="rl") == fingerprint(SMOKE, stage="rl")
    assert fingerprint(other, stage="rl") != fingerprint(SMOKE, stage="rl")


def test_cloning_continues_with_other_settings_of_reinforcement() -> None:
    control = SMOKE.changed(next(path for path in FILES if path.stem == "control"))
    assert fingerprint(control, stage="clone") == fingerprint(SMOKE, stage="clone")


def test_settings_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "learn.yaml"
    path.write_text("screen_px: [480, 320]\nrl: {updates: 3}\n")
    settings = Settings().changed(path)
    assert (settings.rl.updates, settings.agent.image_max_pixels) == (3, 153_600)
    path.write_text("rl: {upgrades: 3}\n")
    with pytest.raises(InputError, match=r"rl.upgrades: unknown key; did you mean updates\?"):
        Settings().changed(path)
    path.write_text("rl\n")
    with pytest.raises(LearnError, match="not a mapping"):
        Settings().changed(path)
    with pytest.raises(LearnError, match="give a YAML file of settings"):
        Settings().changed(tmp_path / "missing.yaml")
    path.write_bytes(b"\x7fELF\xd0")
    with pytest.raises(LearnError, match="give a YAML file of settings"):
        Settings().changed(path)


def test_a_later_file_overrides_an_earlier_one_key_by_key(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("rl: {updates: 3, envd: {attempts: 1, group: tree}}\n")
    second.write_text("rl: {envd: {attempts: 2}}\n")
    settings = SMOKE.changed(first, second)
    assert (settings.size, settings.rl.updates, settings.rl.members) == ("tiny", 3, SMOKE.rl.members)
    assert settings.rl.envd == {"attempts": 2, "group": "tree"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_settings_of_an_ablation_name_it_and_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.parents[2] / "examples" / "own")
    settings = Settings().changed(path)
    names = [name.replace("_", "-") for name in (settings.ablation, settings.arm) if name]
    assert path.stem in ("-".join(names), "long", "cpu", "real", "reading-control")
    assert settings.plugin("127.0.0.1:1")["hosts"] == ["127.0.0.1:1"]
    assert settings.rl.slime.get("custom_generate_function_path", GENERATE) == GENERATE


def base_of(path: Path) -> Path:
    """Return the file that holds the settings of all arms of a comparison."""
    return next((each for each in OTHER_BASES if path.stem.startswith(each.stem)), BASELINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_arms_keep_the_tasks_the_rate_and_the_budget_of_their_base(path: Path) -> None:
    if path.stem in ("colour", "control", "cpu", "flawless", "long", "overfit", "real", "reading-control"):
        pytest.skip("no arm")
    chosen, arm = Settings().changed(base_of(path)), Settings().changed(base_of(path), path)
    assert {split_of(DRAWN.by_id[template].variant(None)) for template in chosen.rl.tasks} <= {"train"}
    assert arm.suite == chosen.suite
    assert (arm.rl.tasks, arm.rl.learning_rate, arm.rl.env_steps) == (
        chosen.rl.tasks,
        chosen.rl.learning_rate,
        chosen.rl.env_steps,
    )


@pytest.mark.parametrize("path", [BASELINE, *OTHER_BASES], ids=lambda path: path.stem)
def test_an_oracle_ends_within_the_turns_of_an_episode(path: Path) -> None:
    """An episode that has no turn left to say that it is done has no reward by the strict rule."""
    settings = Settings().changed(path)
    turns = [
        sum(map(len, template.variant(seed).oracle or ()))
        for template in DRAWN.by_id.values()
        if template.task_id.startswith(f"{settings.suite}/")
        for seed in range(4)
    ]
    assert 3 <= max(turns) <= settings.max_turns


def test_each_comparison_has_its_arms() -> None:
    arms = {base.stem: {path.stem for path in FILES if base_of(path) == base} for base in (BASELINE, *OTHER_BASES)}
    assert {"baseline", "tree", "group-start-drawn", "settle-first", "fake-zeros-30-zero"} <= arms["baseline"]
    assert arms["escape"] == {
        "escape",
        *(f"escape-{arm}-{share}" for arm in ("void", "zero", "typed") for share in (0, 20)),
    }
    assert arms["reading"] == {"reading", "reading-rollouts", "reading-control"}
    assert arms["pages"] == {"pages", "pages-flat", "pages-tree", "pages-siblings", "pages-uncertain"}


def test_the_control_of_reading_continues_its_cloned_policy_for_as_long_as_reinforcement() -> None:
    reading = Settings().changed(BASELINE.with_name("reading.yaml"))
    control = reading.changed(BASELINE.with_name("reading-control.yaml"))
    assert fingerprint(control, stage="clone") == fingerprint(reading, stage="clone")
    assert (control.clone.seconds, control.rl.updates) == (reading.rl.seconds, 0)
    assert (reading.plays_while_cloning, control.plays_while_cloning) == (True, False)
    assert (control.clone.sampled_success, control.clone.min_entropy) == (None, 0)


@pytest.mark.parametrize("given", ["[0.4, 0.1]", "[0, 0.4]", "[0.1, 1.1]", "0.3"])
def test_a_range_of_success_must_increase_from_above_zero_to_at_most_one(tmp_path: Path, given: str) -> None:
    path = tmp_path / "learn.yaml"
    path.write_text(f"clone: {{sampled_success: {given}}}\n")
    with pytest.raises(InputError, match="clone"):
        Settings().changed(path)
    path.write_text("clone: {sampled_success: [0.1, 0.4]}\n")
    assert Settings().changed(path).clone.sampled_success == (0.1, 0.4)


def test_validation_and_the_end_of_cloning_may_change_when_a_run_continues() -> None:
    clone = SMOKE.clone.model_copy(update={"sampled_success": (0.1, 0.4), "min_entropy": 0.3, "check_every": 5})
    other = SMOKE.model_copy(update={"clone": clone, "validation_variants": 3})
    for stage in ("clone", "rl"):
        assert fingerprint(other, stage=stage) == fingerprint(SMOKE, stage=stage)
    smoothed = SMOKE.model_copy(update={"clone": SMOKE.clone.model_copy(update={"label_smoothing": 0.1})})
    assert fingerprint(smoothed, stage="clone") != fingerprint(SMOKE, stage="clone")
    assert fingerprint(changed(per_token_loss=False), stage="rl") != fingerprint(SMOKE, stage="rl")


def test_pictures_are_as_large_as_the_agent_is_given_them() -> None:
    assert Settings().image_px == Settings().screen_px
    real = Settings().changed(BASELINE.with_name("real.yaml"))
    assert (real.screen_px, real.image_px) == ((1280, 800), (640, 384))
    assert real.agent.image_max_pixels >= 640 * 384
