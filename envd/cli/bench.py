"""The commands of `envd bench`."""

import functools
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from cuaenv.cli.terminal import Json, emit_json, out, progress
from envd.base.config import DEFAULT_IMAGE, Config
from envd.base.errors import ConfigError
from envd.bench import branch, checkpoint, episodes, fork, host_report, parked, scale, settle, step
from envd.bench.branch_parents import BranchParent, EditorParent, WritingParent
from envd.bench.default_tasks import DEFAULT_TASKS, TASKS_WITHOUT_SETUP, DefaultTasks
from envd.bench.plot import write_plots
from envd.bench.report import BenchReport, compared
from envd.bench.session import Steps, bench_config, open_bench
from envd.cli.command import command
from envd.cli.own_daemon import ensure_image, own_daemon_options, run_until_signal, with_hypervisor
from envd.cli.tasks_verify import choose
from envd.cli.terminal import print_result
from envd.daemon.suites import load_tasks, with_suites
from envd.hypervisor.backends import backend_of
from envd.hypervisor.machine import GuestOs
from envd.images.catalogue import ImageCatalogue

app = typer.Typer(no_args_is_help=True, help="Measure forks, branches, checkpoints, steps and episodes.")

#: A parent, a group of children, and the next standby set.
_BRANCH_CAPACITY = 1 + 2 * branch.TARGET_GROUP_SIZE
_MAX_MACHINES, _MAX_OTHERS = 64, 255
Repetitions = Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Repetitions of each measurement.")]
OtherImage = Annotated[
    str, typer.Option("--image", metavar="NAME", help="Image of the machines.", show_default="the desktop image")
]
Price = Annotated[
    float,
    typer.Option(metavar="DOLLARS", min=0, help="Price of the host, for what a desktop costs.", show_default="unknown"),
]
Report = Callable[[str, float], None]
Measure = Callable[..., Coroutine[Any, Any, BenchReport]]


Against = Annotated[
    str, typer.Option(metavar="URI", help="Measure this hypervisor too, afterwards, such as qemu.", show_default="none")
]


def bench(name: str, *, is_drawn: bool = False, needs_copies: bool = False) -> Callable[[Measure], Measure]:
    """Return a decorator that registers a benchmark as a command.

    The command has the benchmark's keyword-only options and the shared ones. It builds the default image if the
    benchmark needs it, shows progress, prints the report, and exits with status 1 if a check failed.

    Args:
        is_drawn: Whether it always measures drawn desktops, whichever hypervisor is set.
        needs_copies: Whether it copies running machines.
    """

    def decorate(measure: Measure) -> Measure:
        @app.command(name)
        @command(own_daemon_options(is_drawn=is_drawn), options_of=measure)
        def run(settings: Config, *, as_json: Json = False, **options: Any) -> None:
            if is_drawn:
                settings = _drawn(settings)
            problem = backend_of(settings.hypervisor.uri).capabilities.not_forkable if needs_copies else ""
            if problem:
                raise ConfigError(f"bench {name}: {problem}")
            # Before an event loop runs: libvirt must be imported by then.
            other = options.pop("against", "")
            against = with_hypervisor(settings, other, option="--against") if other else None
            if not options.get("image"):
                ensure_image(settings)
            with progress(f"bench {name}") as report:
                found = run_until_signal(measure(settings, report, **options))
            if against is not None:
                with progress(f"bench {name} against") as report:
                    found = compared(found, run_until_signal(measure(against, report, **options)))
            print_result(found, as_json=as_json)

        return measure

    return decorate


@bench("fork")
async def bench_fork(
    settings: Config,
    report: Report,
    *,
    n: Annotated[int, typer.Option("--n", min=2, max=_MAX_MACHINES, help="Standby machines.")] = 8,
    repetitions: Repetitions = 20,
    image: OtherImage = "",
    against: Against = "",  # noqa: ARG001 -- the decorator's
) -> BenchReport:
    """Measure new machines: leased, forked, booted, resumed, paused; and the memory of used ones."""
    steps = Steps(report, fork.step_count(repetitions))
    settings, task_id = _task_without_setup(settings, image)
    own = bench_config(settings, standby_count=n, capacity=n, image=image)
    async with open_bench(own, steps=steps) as session:
        return await fork.measure_fork(session, task_id=task_id, repetitions=repetitions, steps=steps)


@bench("branch", needs_copies=True)
async def bench_branch(
    settings: Config, report: Report, *, repetitions: Repetitions = 10, image: OtherImage = ""
) -> BenchReport:
    """Measure branches of a live episode; fail unless the child continues from an unchanged parent.

    The parent types into an editor. On another image than the desktop, it writes files instead.
    """
    steps = Steps(report, branch.step_count(repetitions))
    settings, task_id = _task_without_setup(settings, image)
    own = bench_config(settings, standby_count=branch.TARGET_GROUP_SIZE, capacity=_BRANCH_CAPACITY, image=image)
    async with open_bench(own, steps=steps) as session:
        tasks = _default_tasks(settings)
        parent: BranchParent = EditorParent(tasks.editor, tasks.document)
        if image not in {"", DEFAULT_IMAGE}:
            parent = WritingParent(task_id, session.template.spec.image.os)
        return await branch.measure_branch(
            session, light_task_id=task_id, parent=parent, repetitions=repetitions, steps=steps
        )


@bench("checkpoint", needs_copies=True)
async def bench_checkpoint(
    settings: Config,
    report: Report,
    *,
    repetitions: Repetitions = 10,
    depth: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Length of the chain of checkpoints.")] = 32,
) -> BenchReport:
    """Measure checkpoints and episodes that begin in them, next to branches; fail unless a copy shows the same."""
    steps = Steps(report, checkpoint.step_count(repetitions, depth))
    tasks = _default_tasks(settings)
    async with open_bench(bench_config(settings, standby_count=1, capacity=6), steps=steps) as session:
        return await checkpoint.measure_checkpoints(
            session,
            light_task_id=tasks.without_setup,
            parent=EditorParent(tasks.editor, tasks.document),
            repetitions=repetitions,
            depth=depth,
            steps=steps,
        )


@bench("parked", needs_copies=True)
async def bench_parked(
    settings: Config,
    report: Report,
    *,
    episodes: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Open episodes.")] = 40,
    resident: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Machines in memory.")] = 8,
    steps: Annotated[int, typer.Option(metavar="N", min=3, max=1000, help="Steps of each episode.")] = 8,
    think: Annotated[float, typer.Option(metavar="S", min=0, max=600, help="Mean pause before a step.")] = 30.0,
    price_per_hour: Price = 0.0,
) -> BenchReport:
    """Measure the steps of more open episodes than machines; fail unless every document has what was typed."""
    tasks = _default_tasks(settings)
    plan = parked.ParkedPlan(
        task=tasks.editor,
        document=tasks.document,
        episode_count=episodes,
        resident_count=resident,
        step_count=steps,
        think_s=think,
        price_per_hour=price_per_hour,
    )
    return await parked.measure_parked(settings, plan, steps=Steps(report, plan.work_count))


@bench("scale", is_drawn=True)
async def bench_scale(
    settings: Config,
    report: Report,
    *,
    machines: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Machines, and clients.")] = 256,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, max=600, help="Duration of each phase.")] = 10.0,
    daemons: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Daemons that share the machines.")] = 1,
) -> BenchReport:
    """Measure the steps per second of many clients at drawn desktops of one or several daemons, against bare gRPC."""
    return await scale.measure_scale(
        settings,
        machine_count=machines,
        daemon_count=daemons,
        duration_s=seconds,
        steps=Steps(report, scale.step_count()),
    )


@bench("episodes")
async def bench_episodes(
    settings: Config,
    report: Report,
    *,
    episode_count: Annotated[
        int, typer.Option("--episodes", metavar="N", min=1, max=10_000, help="Our episodes.")
    ] = 16,
    peer_episode_count: Annotated[
        int, typer.Option("--peer-episodes", metavar="N", min=1, max=10_000, help="Episodes of OSWorld's DesktopEnv.")
    ] = 4,
    concurrency: Annotated[
        int, typer.Option(metavar="N", min=1, max=_MAX_MACHINES, help="Episodes at a time, on both sides.")
    ] = 2,
    think: Annotated[float, typer.Option(metavar="S", min=0, max=600, help="Time before each step.")] = 2.0,
    peer_step_pause: Annotated[
        float, typer.Option(metavar="S", min=0, max=600, help="Pause of DesktopEnv after each action.")
    ] = 2.0,
    image: Annotated[str, typer.Option(metavar="NAME", help="Image of the machines.")] = "osworld",
    oracles: Annotated[
        bool, typer.Option("--oracles", help="Play oracles of the desktop image's tasks instead, without a peer.")
    ] = False,
    against: Against = "",  # noqa: ARG001 -- the decorator's
) -> BenchReport:
    """Measure whole episodes per hour of OSWorld's tasks, and of OSWorld's own DesktopEnv on the same machines."""
    capabilities = backend_of(settings.hypervisor.uri).capabilities
    if not capabilities.runs_guests:
        raise ConfigError("bench episodes: drawn desktops run no guests; leave out --hypervisor fake")
    plan = episodes.EpisodesPlan(
        concurrency=concurrency,
        episode_count=episode_count,
        peer_episode_count=peer_episode_count,
        think_s=think,
        peer_step_pause_s=peer_step_pause,
    )
    steps = Steps(report, plan.step_count)
    if oracles:
        chosen = choose(load_tasks(settings), list(_default_tasks(settings).settle))
        own = bench_config(settings, standby_count=concurrency, capacity=2 * concurrency)
        async with open_bench(own, steps=steps) as session:
            return await episodes.measure_oracles(session, plan, tasks=chosen, steps=steps)
    if capabilities.not_forkable:
        raise ConfigError(
            "bench episodes: OSWorld's DesktopEnv boots virtual machines; add --oracles, or use QEMU, the default"
        )
    python, tasks = episodes.require_osworld(settings.cache_dir)
    own = bench_config(settings, standby_count=concurrency, capacity=2 * concurrency, image=image)
    async with open_bench(own, steps=steps) as session:
        return await episodes.measure_episodes(session, plan, python=python, tasks=tasks, steps=steps)


@bench("step")
async def bench_step(
    settings: Config,
    report: Report,
    *,
    repetitions: Repetitions = 200,
    peer_repetitions: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="Steps performed as peers do, at least 2 s each.")
    ] = 30,
    others: Annotated[
        int, typer.Option(metavar="N", min=0, max=_MAX_OTHERS, help="Idle episodes that are open meanwhile.")
    ] = 0,
    against: Against = "",  # noqa: ARG001 -- the decorator's
) -> BenchReport:
    """Measure the overhead of a step beyond input and settling, and the same actions performed as peers do."""
    task = load_tasks(settings).get(_default_tasks(settings).editor)
    steps = Steps(report, step.step_count(repetitions, peer_repetitions))
    # The peers' machine is the one that replaces the leased standby machine.
    own = bench_config(settings, standby_count=1, capacity=2 + others)
    async with open_bench(own, steps=steps) as session:
        return await step.measure_step(
            session,
            task=task,
            repetitions=repetitions,
            peer_repetitions=peer_repetitions,
            other_count=others,
            steps=steps,
        )


@bench("settle")
async def bench_settle(
    settings: Config,
    report: Report,
    *,
    task_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASK", help="Task ids, or SUITE/ for a whole suite.", show_default="six tasks"),
    ] = None,
    watch_s: Annotated[
        float, typer.Option(metavar="S", min=0.1, max=10, help="How long after a step's frame a change is late.")
    ] = 3.0,
    image: OtherImage = "",
) -> BenchReport:
    """Measure how long steps wait for the screen to settle, and how often it changes after the returned frame.

    Plays the oracles of tasks. All policies are compared on the same recorded steps.
    """
    if image not in {"", DEFAULT_IMAGE}:
        settings, default_id = _task_without_setup(settings, image)
        wanted = task_ids or [default_id]
    else:
        wanted = task_ids or list(_default_tasks(settings).settle)
    tasks = choose(load_tasks(settings), wanted)
    steps = Steps(report, sum(len(task.oracle) for task in tasks))
    async with open_bench(bench_config(settings, standby_count=1, capacity=2, image=image), steps=steps) as session:
        return await settle.measure_settle(session, tasks, watch_s=watch_s, steps=steps)


def all_measures(settings: Config, price_per_hour: float) -> dict[str, host_report.Measure]:
    """Return all benchmarks of a report by name; those that take longest come last."""
    return {
        "fork": functools.partial(bench_fork, settings, n=4, repetitions=10),
        "step": functools.partial(bench_step, settings, repetitions=50, peer_repetitions=10),
        "scale": functools.partial(bench_scale, _drawn(settings), machines=64, seconds=5.0),
        "branch": functools.partial(bench_branch, settings, repetitions=5),
        "checkpoint": functools.partial(bench_checkpoint, settings, repetitions=5, depth=8),
        "episodes": functools.partial(bench_episodes, settings, episode_count=8, oracles=True),
        "settle": functools.partial(bench_settle, settings),
        "parked": functools.partial(
            bench_parked, settings, episodes=16, resident=4, steps=4, think=10.0, price_per_hour=price_per_hour
        ),
    }


def report_measures(settings: Config, price_per_hour: float) -> dict[str, host_report.Measure]:
    """Return the benchmarks that the backend can run, by name."""
    capabilities = backend_of(settings.hypervisor.uri).capabilities
    lacking = ["branch", "checkpoint", "parked"] if capabilities.not_forkable else []
    lacking += [] if capabilities.runs_guests else ["episodes"]
    measures = all_measures(settings, price_per_hour)
    return {name: measure for name, measure in measures.items() if name not in lacking}


@app.command("report")
@command(own_daemon_options())
def report(
    settings: Config,
    *,
    directory: Annotated[Path, typer.Option("--out", metavar="DIR", help="Output directory.")] = Path("out/report"),
    minutes: Annotated[float, typer.Option(metavar="N", min=1, max=600, help="Time for all benchmarks.")] = 30.0,
    price_per_hour: Price = 0.0,
) -> None:
    """Run all benchmarks in short, and write one page about this host that can be published."""
    with _writing(directory):  # what took minutes is not to be lost
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    ensure_image(settings)
    measures = report_measures(settings, price_per_hour)
    with progress("bench report") as on_progress:
        parts = run_until_signal(host_report.measure_host(measures, limit_s=60 * minutes, report=on_progress))
    with _writing(directory):
        page = host_report.write_page(parts, directory, replaces=all_measures(settings, price_per_hour))
    out.print(f"wrote {page}", markup=False, soft_wrap=True)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {directory}: cannot be written: {error.strerror or error}") from error


@app.command("plot")
@command()
def bench_plot(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Directory of reports NAME.json.")
    ],
    *,
    as_json: Json = False,
) -> None:
    """Draw the JSON reports of a directory as SVG next to them: samples, growth, settling, steps per second."""
    written = write_plots(directory)
    if as_json:
        emit_json({"written": [str(path) for path in written]})
    else:
        for path in written:
            out.print(path, markup=False, soft_wrap=True)


def _drawn(settings: Config) -> Config:
    return with_hypervisor(settings, "fake", option="--hypervisor")


def _task_without_setup(settings: Config, image: str) -> tuple[Config, str]:
    """Return settings that serve a task without setup for an image, and its id. Raises: ImageNotFound."""
    if not image:
        return settings, _default_tasks(settings).without_setup
    task_id = TASKS_WITHOUT_SETUP[GuestOs(ImageCatalogue(settings.cache_dir).get(image).os)]
    return with_suites(settings, [task_id]), task_id


def _default_tasks(settings: Config) -> DefaultTasks:
    return DEFAULT_TASKS[backend_of(settings.hypervisor.uri).capabilities.task_suite]
