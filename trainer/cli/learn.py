"""`trainer learn`: learn on one GPU from drawn desktops."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from cuaenv.cli.terminal import err, out, progress
from trainer.cli.options import SlimeHome, slime_checkout
from trainer.cli.output import UsageError, reports_errors
from trainer.learn import LearnError
from trainer.learn.daemons import print_oracles, started_daemons
from trainer.learn.settings import SMOKE, Settings
from trainer.learn.setup import COMMIT, URL, default_home, fetch_slime, is_checkout, missing_packages
from trainer.slime.config import Halted

_Stage = Literal["setup", "base", "demos", "clone", "rl", "report", "all"]
#: The stages of `all`.
_ALL: Final[tuple[_Stage, ...]] = ("demos", "clone", "rl", "report")
#: What helps without GPU memory.
_MEMORY: Final = "use a larger GPU, or one that no other program uses"


@reports_errors(LearnError, Halted, OSError, to_continue="repeat the command with --resume to continue")
def learn_command(
    *,
    stage: Annotated[
        _Stage,
        typer.Argument(metavar="STAGE", show_choices=False, help="setup, base, demos, clone, rl, report, or all."),
    ],
    run: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("out/learn"),
    config: Annotated[
        list[Path] | None,
        typer.Option(help="YAML file of settings; see docs/learning.md. Repeat it: later files override earlier ones."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny settings that run everything on a CPU; --config overrides them.")
    ] = False,
    name: Annotated[
        str, typer.Option(help="Directory of the stage rl in the run; default: ABLATION-ARM-SEED, or rl-SEED.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of sampling and the order of tasks.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the saved state.")] = False,
    envd: Annotated[
        list[str] | None, typer.Option(help="Address of a daemon; repeat it. Default: start daemons on this host.")
    ] = None,
    runs: Annotated[
        list[Path] | None, typer.Option(help="Further run directories for the stage report; repeat it.")
    ] = None,
    slime_home: SlimeHome = None,
    slime_source: Annotated[
        str, typer.Option(metavar="URL|DIR", help="Repository from which the stage setup takes slime's code.")
    ] = URL,
) -> None:
    """Learn on one GPU from drawn desktops: demonstrations, cloning, reinforcement, report."""
    if stage == "setup":
        _setup(slime_source, (slime_home or default_home()).expanduser().resolve())
        return
    settings = (SMOKE if smoke else Settings()).changed(*config or [])
    settings.plugin("127.0.0.1:1")
    if envd and settings.desktops.model_fields_set:
        raise UsageError("--envd: `desktops` is for daemons that this command starts; leave out one of them")
    wanted = _ALL if stage == "all" else (stage,)
    if wanted != ("base",) and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise UsageError("torchrun: several processes are for the stage base; start the other stages without torchrun")
    plays = {"rl", *({"clone"} if settings.plays_while_cloning else ())}
    slime = slime_checkout(slime_home) if plays & set(wanted) else Path()
    if stage == "all":  # the first stage takes minutes, and needs fewer of them
        _require_packages()
    # Bars of slime and transformers would hide the lines of progress.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
    default = f"{'-'.join(filter(None, (settings.ablation, settings.arm))) or 'rl'}-{seed}"
    work = _Work(settings, run.expanduser().resolve(), seed=seed, name=name or default, resume=resume)
    with ExitStack() as running:
        # As Ctrl-C: a process that is killed at once would leave its daemons.
        running.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        hosts = envd or []
        if {"demos", *plays} & set(wanted) and not hosts:
            # Each run has its own, because several may share the demonstrations and the cloned policy.
            hosts = running.enter_context(started_daemons(work.run / "daemons" / work.name, work.settings))
        for each in wanted:
            err.print(f"stage {each}", markup=False)
            match each:
                case "base":
                    work.base()
                case "demos":
                    work.demos(hosts)
                case "clone":
                    work.clone(hosts, slime)
                case "rl":
                    work.reinforce(hosts, slime)
                case "report":
                    work.report(runs or [])


def _setup(source: str, home: Path) -> None:
    """Fetch slime's code unless it is there, and name the packages that are missing."""
    if is_checkout(home):
        err.print(f"slime is in {home}", markup=False, soft_wrap=True)
    else:
        with progress("fetching slime") as report:
            fetch_slime(source, home, report=report)
        err.print(f"fetched slime {COMMIT[:9]} into {home}", markup=False, soft_wrap=True)
    _require_packages()
    out.print("ready: trainer learn all --smoke", markup=False)


def _require_packages() -> None:
    if missing := missing_packages():
        raise LearnError(
            f"packages {', '.join(missing)}: not installed; run {sys.executable} -m pip install 'envd-trainer[learn]',"
            " or '.[learn]' in a checkout"
        )


@dataclass(slots=True)
class _Work:
    """One invocation."""

    settings: Settings
    run: Path
    seed: int
    name: str
    resume: bool

    def base(self) -> None:
        """Learn to read the screen, or probe the base that the settings name."""
        from trainer.learn.base import probe_checkpoint, train  # noqa: PLC0415
        from trainer.learn.policy import memory_errors  # noqa: PLC0415
        from trainer.learn.record import MetricsLog  # noqa: PLC0415

        with MetricsLog(self.run / "base") as log, memory_errors(f"lower base.screens, or {_MEMORY}"):
            if named := self._stored_base("checkpoint"):
                probe_checkpoint(self.settings, named, self.run / "base", seed=self.seed, log=log)
                return
            start = self._stored_base("start")
            train(self.settings, self.run / "base", start=start, seed=self.seed, log=log, resume=self.resume)

    def demos(self, hosts: list[str]) -> None:
        """Play oracles, unless that is done."""
        from trainer.learn import demos  # noqa: PLC0415 -- each stage imports what it needs

        directory = self.run / "demos"
        if (directory / "rows.npz").exists():
            err.print(f"{directory} has rows already; they are kept", markup=False, soft_wrap=True)
            return
        directory.mkdir(parents=True, exist_ok=True)
        oracle_file = directory / "oracles.jsonl"
        wanted = self.settings.demos
        print_oracles(oracle_file, suite=self.settings.suite, seeds=range(wanted.seeds), templates=wanted.tasks)
        counts = demos.play(self.settings, hosts, oracle_file, directory, base=self._base_checkpoint())
        err.print(f"{counts['episodes']:.0f} episodes, {counts['rows']:.0f} rows in {directory}", markup=False)

    def _base_checkpoint(self) -> Path | None:
        """Return the base to start from. Raises: LearnError: The settings name one that does not exist."""
        from trainer.learn.checkpoint import is_packed  # noqa: PLC0415

        path = self._stored_base("checkpoint") or self.run / "base" / "model"
        if not is_packed(path):
            return None
        err.print(f"cloning will start from {path}", markup=False, soft_wrap=True)
        return path

    def _stored_base(self, key: Literal["checkpoint", "start"]) -> Path | None:
        """Return the base that a setting names. Raises: LearnError: It does not exist."""
        from trainer.learn.checkpoint import is_packed  # noqa: PLC0415

        named = getattr(self.settings.base, key)
        if not named:
            return None
        path = Path(named).expanduser().resolve()
        if not is_packed(path):
            raise LearnError(f"base.{key} {path}: no base is there; name a directory `base/model` of a run")
        return path

    def clone(self, hosts: list[str], slime_home: Path) -> None:
        """Clone the demonstrations."""
        from trainer.learn.clone import clone  # noqa: PLC0415
        from trainer.learn.policy import memory_errors  # noqa: PLC0415
        from trainer.learn.record import MetricsLog  # noqa: PLC0415

        played = {}
        if self.settings.plays_while_cloning:
            from trainer.learn.reinforce import validation  # noqa: PLC0415

            played["validation"] = partial(
                validation, settings=self.settings, run=self.run, hosts=hosts, slime_home=slime_home, seed=self.seed
            )
        remedy = f"lower clone.batch, or {_MEMORY}"
        with MetricsLog(self.run / "clone") as log, progress("clone") as report, memory_errors(remedy):
            clone(
                self.settings,
                self.run / "demos",
                self.run / "clone",
                seed=self.seed,
                log=log,
                resume=self.resume,
                report=report,
                **played,
            )

    def reinforce(self, hosts: list[str], slime_home: Path) -> None:
        """Learn by reinforcement."""
        from trainer.learn.policy import memory_errors  # noqa: PLC0415
        from trainer.learn.record import MetricsLog  # noqa: PLC0415
        from trainer.learn.reinforce import learner, reinforce  # noqa: PLC0415

        with (
            memory_errors(_MEMORY),
            MetricsLog(self.run / self.name) as log,
            learner(
                self.settings, run=self.run, hosts=hosts, slime_home=slime_home, name=self.name, seed=self.seed, log=log
            ) as learning,
        ):
            reinforce(learning, self.settings, seed=self.seed, resume=self.resume)

    def report(self, more: list[Path]) -> None:
        """Write the results of this run directory and others."""
        from trainer.learn.report import write_report  # noqa: PLC0415

        runs = [self.run, *(path.expanduser().resolve() for path in more)]
        results = write_report(list(dict.fromkeys(runs)), self.run / "report")
        grpo, named = results["grpo"], results["runs"].items()
        shown = {name: value for name, value in grpo.items() if name.startswith(("held", "seeds", "incom"))}
        solved = {"solved_frac": {name: run["solved_frac"] for name, run in named if "solved_frac" in run}}
        out.print_json(json.dumps(shown if grpo["seeds"] else solved))
        err.print(f"{self.run / 'report'} has results.json and plots", markup=False, soft_wrap=True)
