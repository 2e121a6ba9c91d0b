"""Settings of a run of `trainer learn`, from a YAML file; `--smoke` has its own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from cuaenv.frames.size import fit
from cuaenv.problems import without_path
from trainer.agent.settings import AgentSettings
from trainer.agent.system_prompt import STANDARD
from trainer.config import STRICT, parse
from trainer.learn import LearnError
from trainer.slime.config import SlimeConfig

_NAME = r"^[a-z0-9_.-]*$"
#: First seed of the held-out variants of trained templates; demonstrations and training use seeds from 0.
HELD_OUT_SEED = 1_000_000_000
#: First seed of the validation variants, so that no decision of a run depends on a held-out one.
VALIDATION_SEED = 2_000_000_000


class Demos(BaseModel):
    """Stage `demos`."""

    model_config = STRICT

    tasks: list[str] = Field(default_factory=list)
    """Training templates that oracles play; empty for all of them."""
    seeds: int = Field(default=640, ge=1)
    """Variants of each of them."""
    repeats: int = Field(default=1, ge=1)
    """How often each variant is played, with other mistakes each time."""
    concurrency: int = Field(default=24, ge=1)
    """Concurrent episodes of each process."""
    wrong_button: float = Field(default=0.0, ge=0, lt=1)
    """Share of left clicks that demonstrators make with the right button."""
    stops_early: float = Field(default=0.0, ge=0, lt=1)
    """Chance, before each turn of an unfinished task, that demonstrators declare it done."""
    escapes: float = Field(default=0.0, ge=0, lt=1)
    """Chance, before each turn of an unfinished task, that demonstrators press Ctrl+Alt+Del, which ends the guest."""


class Base(BaseModel):
    """Stage `base`."""

    model_config = STRICT

    checkpoint: str = ""
    """Directory of a trained base, from which `demos` and so `clone` start, and which the stage `base` then probes and
    does not train; empty for `base/model` of the run, if the stage `base` wrote it."""
    start: str = ""
    """Directory of a trained base whose weights the stage `base` trains further, with another `--seed`
    on other screens; empty for random weights."""
    fonts: list[Path] = Field(default_factory=lambda: [Path("/usr/share/fonts")], strict=False)
    """Directories of fonts that screens show besides the desktop's own."""
    recorded: list[Path] = Field(default_factory=list, strict=False)
    """Directories of recorded screens of real programs that are shown in addition to drawn ones, in training alone; see
    `envd.drawn.screens`. They need the size `screen_px`."""
    processes: int = Field(default=0, ge=0)
    """Pairs of processes that draw screens and make rows of them; 0 for half of the cores."""
    steps: int = Field(default=1_000_000, ge=1)
    seconds: float = Field(default=2000.0, ge=0)
    """Stop after this time of training, resumed runs together; 0 for never."""
    screens: int = Field(default=64, ge=1)
    """Screens of a step and GPU, each with several questions. Two H200 make 9,000 questions a second with 16, 19,500
    with 64."""
    row_tokens: int = Field(default=720, ge=64)
    """Tokens of a screen with its questions; those that do not fit are left out."""
    learning_rate: float = Field(default=6e-4, gt=0)
    warmup_steps: int = Field(default=200, ge=1)
    probe_every_s: float = Field(default=60.0, gt=0)
    save_every_s: float = Field(default=120.0, gt=0)
    probe_screens: int = Field(default=300, ge=1)
    """Screens of each set of probes."""
    probe_questions: int = Field(default=400, ge=1)
    """Most questions of each kind in a set of probes; a quarter while training."""
    is_compiled: bool = False
    """Compile the layers by torch, as in `clone`."""

    @model_validator(mode="after")
    def _is_trained_or_probed(self) -> Self:
        if self.checkpoint and self.start:
            raise ValueError("checkpoint is probed and start is trained further; name one of them")
        return self


class Clone(BaseModel):
    """Stage `clone`."""

    model_config = STRICT

    steps: int = Field(default=2000, ge=1)
    seconds: float = Field(default=0.0, ge=0)
    """Stop after this time even if steps are left; 0 for never."""
    batch: int = Field(default=128, ge=1)
    learning_rate: float = Field(default=6e-4, gt=0)
    warmup_steps: int = Field(default=100, ge=1)
    """Steps in which the learning rate rises. Nothing is measured before their end: the first steps unlearn what a base
    is certain of, and succeeds with."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target that all tokens of the vocabulary have together, so that the policy keeps some doubt."""
    check_every: int = Field(default=100, ge=1)
    """Steps between two measurements, on rows of unseen variants and in validation episodes."""
    stop_at: float = Field(default=1.0, gt=0, le=1)
    """Stop once this share of replies in rows of unseen variants is right: reinforcement needs room and signal."""
    sampled_success: tuple[float, float] | None = Field(default=None, strict=False)
    """Stop once sampled replies succeed as often as the first number says. An earlier end is an error, and so is a
    higher success than the second number. What counts is the share of solved validation episodes if there are any
    (`validation_variants`), otherwise the chance to sample the right reply in rows of unseen variants."""
    keeps_reading: bool = False
    """Train each step also on a batch of the stage `base`, so that a policy that is cloned from few demonstrations does
    not forget what it has learnt to read."""
    min_entropy: float = Field(default=0.0, ge=0)
    """Stop once the entropy of a reply's token, in nats, is less in rows of unseen variants: a policy that is certain
    explores nothing. 0 for never."""
    is_compiled: bool = False
    """Compile the layers by torch, which needs a C compiler and some minutes; for long runs."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.sampled_success is not None and not 0 < self.sampled_success[0] < self.sampled_success[1] <= 1:
            raise ValueError("sampled_success must be two increasing numbers up to 1, such as [0.1, 0.4]")
        return self


class Desktops(BaseModel):
    """Desktops of the daemons that `trainer learn` starts."""

    model_config = STRICT

    reaction_ms: int = Field(default=0, ge=0, le=10_000)
    """Programs react to each input after up to this many milliseconds."""
    always_running: bool = False
    """Do not pause machines between steps, so that programs react while the model replies."""
    quiet_ms: int = Field(default=0, ge=0, le=5000)
    """A step returns once the screen has not changed for this long: 0 for the first frame after the input."""
    pause_ms: int = Field(default=0, ge=0, le=5000)
    """A step never returns sooner than this after its last input."""


class Reinforce(BaseModel):
    """Stage `rl`."""

    model_config = STRICT

    updates: int = Field(default=150, ge=0)
    """0 to evaluate the cloned policy and end."""
    seconds: float = Field(default=0.0, ge=0)
    """Stop after this time even if updates are left; 0 for never."""
    env_steps: int = Field(default=0, ge=0)
    """Stop after this many turns of training episodes even if updates are left; 0 for never."""
    groups: int = Field(default=32, ge=1)
    """Groups per update, of all workers."""
    members: int = Field(default=8, ge=2)
    tasks: list[str] = Field(default_factory=list)
    """Train on these alone: templates, of which `train_seeds` variants are used, or single variants
    (`drawn/press?seed=3`). Empty for all training templates. With it, `held_out_variants` and
    `held_out_template_variants` may both be 0, for no evaluation."""
    train_seeds: int = Field(default=2000, ge=1)
    """Variants of each training template."""
    estimator: Literal["grpo", "gspo"] = "grpo"
    learning_rate: float = Field(default=5e-5, gt=0)
    steps_per_rollout: int = Field(default=2, ge=1)
    per_token_loss: bool = True
    """All trained tokens of a step count equally, as with slime's `--calculate-per-token-loss`. Without it each rollout
    counts once, so a token of a long one counts for less."""
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    temperature: float = Field(default=1.0, gt=0)
    micro_rows: int = Field(default=128, ge=1)
    """Rows of one forward pass; halved while no GPU memory is left. Learners that share a GPU need fewer: one takes
    all that it can get."""
    save_every: int = Field(default=25, ge=1)
    evaluate_every: int = Field(default=50, ge=1)
    """Updates between two evaluations on held-out variants, with greedy replies."""
    validate_every: int = Field(default=10, ge=1)
    """Updates between two plays of the validation episodes, if there are any."""
    envd: dict[str, Any] = Field(default_factory=dict)
    """Further keys of `trainer.slime.config.SlimeConfig`, such as `group`, `reward`, `branch` or `curriculum`."""
    slime: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of slime, such as `custom_generate_function_path` and those that this function reads."""


class Settings(BaseModel):
    """A run."""

    model_config = STRICT

    ablation: str = Field(default="", pattern=_NAME)
    """Name of the comparison that this run belongs to; `baseline` and `control` belong to all of them."""
    arm: str = Field(default="", pattern=_NAME)
    """What differs in this run."""
    suite: str = "drawn"
    screen_px: tuple[int, int] = Field(default=(512, 320), strict=False)
    """Screen of the desktops: width, height."""
    image_max_pixels: int = Field(default=0, ge=0)
    """Pictures are scaled down to at most so many pixels; 0 for the whole screen."""
    size: Literal["tiny", "small"] = "small"
    device: str = ""
    """Device by torch's name; empty for `cuda` if there is one, else `cpu`."""
    workers: int = Field(default=8, ge=1)
    """Processes that roll out, each with a daemon of its own if `trainer learn` starts the daemons."""
    machines: int = Field(default=48, ge=1)
    """Desktops of each daemon that `trainer learn` starts."""
    prompt: str = STANDARD
    """Prompt of demonstrations and policy, see `AgentSettings.prompt`."""
    grammar: str = "qwen3-vl"
    """Grammar of demonstrations and policy, see `AgentSettings.grammar`."""
    max_turns: int = Field(default=7, ge=1)
    reply_tokens: int = Field(default=40, ge=8)
    held_out_variants: int = Field(default=8, ge=0)
    """Unseen variants of each template that is trained, in an evaluation."""
    held_out_template_variants: int = Field(default=24, ge=0)
    """Variants of each held-out template in an evaluation."""
    validation_variants: int = Field(default=0, ge=0)
    """Validation episodes of each template that is trained, one per variant, with sampled replies: they may decide when
    cloning stops, and are logged during `rl`. Their seeds are neither trained nor held out. 0 for none."""
    desktops: Desktops = Field(default_factory=Desktops)
    base: Base = Field(default_factory=Base)
    demos: Demos = Field(default_factory=Demos)
    clone: Clone = Field(default_factory=Clone)
    rl: Reinforce = Field(default_factory=Reinforce)

    def changed(self, *paths: Path) -> Self:
        """Return these settings with those of YAML files; a later file overrides an earlier one.

        Raises:
            InputError: A key is unknown or a value invalid.
            LearnError: A file cannot be read.
        """
        import yaml  # noqa: PLC0415 -- for this alone

        mapping = self.model_dump(mode="json", exclude_unset=True)
        for path in paths:
            try:
                changes = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise LearnError(
                    f"{path}: cannot be read: {without_path(error)}; give a YAML file of settings"
                ) from error
            if not isinstance(changes, dict):
                raise LearnError(f"{path}: not a mapping; give a YAML file of settings")
            mapping = _merged(mapping, changes)
        return parse(type(self), mapping)

    @property
    def agent(self) -> AgentSettings:
        """The agent: one screenshot a row, so that rows are short and equal."""
        return AgentSettings(**self.agent_mapping)

    @property
    def image_px(self) -> tuple[int, int]:
        """Width and height of the pictures that the policy is given."""
        agent = self.agent
        return fit(*self.screen_px, max_pixel_count=agent.image_max_pixels, multiple_px=agent.image_multiple_px)

    @property
    def agent_mapping(self) -> dict[str, Any]:
        width, height = self.screen_px
        return {
            "grammar": self.grammar,
            "prompt": self.prompt,
            "max_turns": self.max_turns,
            "images_per_row": 1,
            "images_kept": 1,
            "image_max_pixels": self.image_max_pixels or width * height,
            "prompt_tokens": 1024,
            "reply_tokens": self.reply_tokens,
            "context_tokens": 8192,
            "timeout_s": 300.0,
        }

    def plugin(self, host: str) -> dict[str, Any]:
        """Return the mapping `envd:` of the plug-in for one daemon. Raises: InputError: `rl.envd` is invalid."""
        mapping = {
            "hosts": [host],
            "engine_timeout_s": 120.0,
            "engine_retries": 3,
            "group_wait_s": 30.0,
            **self.rl.envd,
            "agent": self.agent_mapping,
        }
        SlimeConfig.from_mapping(mapping)
        return mapping

    @property
    def plays_while_cloning(self) -> bool:
        """Whether the stage `clone` plays validation episodes."""
        return self.clone.sampled_success is not None and self.validation_variants > 0

    @property
    def torch_device(self) -> str:
        """The device. Raises: LearnError: There is no such device."""
        import torch  # noqa: PLC0415 -- seconds

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise LearnError(f"device {device}: torch sees no GPU; set `device: cpu` or install torch for CUDA")
        return device


SMOKE = Settings(
    size="tiny",
    workers=1,
    machines=8,
    held_out_variants=1,
    held_out_template_variants=1,
    base=Base(
        fonts=[],
        processes=1,
        steps=6,
        seconds=0.0,
        screens=4,
        row_tokens=320,
        warmup_steps=2,
        learning_rate=3e-3,
        probe_screens=2,
        probe_questions=2,
    ),
    demos=Demos(seeds=2, concurrency=4),
    clone=Clone(steps=6, batch=8, warmup_steps=2, learning_rate=3e-3),
    rl=Reinforce(updates=2, groups=2, members=2, train_seeds=4, steps_per_rollout=1, micro_rows=16, save_every=1),
)
"""Every stage on a CPU in about two minutes; learns nothing."""


def fingerprint(settings: Settings, *, stage: str) -> Mapping[str, Any]:
    """Return the settings that must be equal for a resumed stage, as JSON values."""
    mapping: dict[str, Any] = json.loads(settings.model_dump_json())
    # States of releases without these settings lack them.
    for name in ("prompt", "grammar"):
        if mapping[name] == Settings.model_fields[name].default:
            del mapping[name]
    if not mapping["clone"]["keeps_reading"]:
        del mapping["clone"]["keeps_reading"]
    if stage != "base":
        del mapping["base"]
    parts = {"base": ("base",), "clone": ("suite", "demos", "clone")}
    if stage in parts:
        kept = ("prompt", "grammar", "screen_px", "image_max_pixels", "size", "max_turns", *parts[stage])
        mapping = {key: mapping[key] for key in kept if key in mapping}
    free: dict[str, tuple[str, ...]] = {
        "": ("device", "workers", "machines", "validation_variants"),
        "base": (
            *("checkpoint", "start", "fonts", "recorded", "processes", "steps", "seconds", "is_compiled"),
            *("probe_every_s", "save_every_s", "probe_screens", "probe_questions"),
        ),
        "clone": ("steps", "seconds", "stop_at", "sampled_success", "min_entropy", "check_every", "is_compiled"),
        "rl": ("updates", "seconds", "env_steps", "micro_rows", "validate_every"),
    }
    for name, keys in free.items():
        part = mapping.get(name, {}) if name else mapping
        for key in keys:
            part.pop(key, None)
    return mapping


def _merged(mapping: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    def value(key: str, new: Any) -> Any:
        old = mapping.get(key)
        return _merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new

    return {**mapping, **{key: value(key, new) for key, new in changes.items()}}
