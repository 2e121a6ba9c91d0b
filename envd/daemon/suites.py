"""Load the tasks that a configuration serves."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources import as_file
from importlib.resources import files as resources
from importlib.resources.abc import Traversable
from pathlib import Path

from envd.base.config import Config
from envd.base.config_values import BUILTIN_TASKS
from envd.base.errors import ConfigError, ImageNotFound
from envd.drawn.suite import DRAWN
from envd.hypervisor.backends import backend_of
from envd.hypervisor.machine import GuestOs
from envd.images.catalogue import ImageCatalogue
from envd.integrations.osworld.catalogue import desktop_task, osworld_tasks
from envd.integrations.osworld.environment import Environment
from envd.integrations.osworld.files import read_files
from envd.integrations.osworld.host import host_of, obstacles_of
from envd.tasks.catalogue import TaskCatalogue, TaskFile, read_all
from envd.tasks.formats.entries import Found, Problem
from envd.tasks.model import Offer
from envd.tasks.suites.desktop import DESKTOP
from envd.tasks.systems import task_systems

logger = logging.getLogger(__name__)


def load_tasks(config: Config, *, include_osworld: bool = True) -> TaskCatalogue:
    """Load the built-in suite, the files that `config` adds, and OSWorld's tasks if they are registered.

    Raises:
        ConfigError: A file or directory has problems and no task.
    """
    with _sources(config) as (files, include_builtin):
        catalogue = TaskCatalogue.load(
            files, include_builtin=include_builtin, templates=DESKTOP if include_builtin else DRAWN
        )
    if not backend_of(config.hypervisor.uri).capabilities.runs_guests:
        return catalogue.with_tasks((), hidden=[desktop_task()])
    offers = list(_offers(config))
    environment = Environment(config.cache_dir)
    if environment.tasks is None or not include_osworld:
        return catalogue.with_tasks((), hidden=[desktop_task()], offers=offers)
    host = host_of(config, known=environment.known_names())
    tasks = list(osworld_tasks(environment.tasks))
    for problem in (each for each in tasks if isinstance(each, Problem)):
        logger.warning("a task is left out: %s", problem)
    return catalogue.with_tasks(
        tasks,
        hidden=[desktop_task()],
        find_obstacles=obstacles_of(read_files(environment.tasks)[0] if config.tasks.check_obstacles else (), host),
        offers=offers,
    )


def with_suites(config: Config, names: Sequence[str]) -> Config:
    """Return settings that also load those of the named suites that are built in but only loaded on request.

    A suite whose file the settings name is not loaded twice.

    Args:
        names: `SUITE`, `SUITE/` or `SUITE/TASK`.
    """
    known = optional_suites().keys() - {Path(path).stem for path in config.tasks.suites}
    added = [f"{BUILTIN_TASKS}{suite}" for suite in (name.partition("/")[0] for name in names) if suite in known]
    suites = dict.fromkeys([*config.tasks.suites, *added])
    return config.model_copy(update={"tasks": config.tasks.model_copy(update={"suites": tuple(suites)})})


def inspect_tasks(config: Config) -> Found:
    """Yield all tasks of the built-in suite and of the files that `config` adds, and all problems in them."""
    with _sources(config) as (files, include_builtin):
        yield from read_all(files, include_builtin=include_builtin, templates=DESKTOP if include_builtin else DRAWN)


def _offers(config: Config) -> Iterator[Offer]:
    """Yield what the pools' images provide; nothing for images that are not built yet."""
    images = ImageCatalogue(config.cache_dir)
    for name, pool in config.pools.items():
        with suppress(ImageNotFound):
            image = images.get(pool.image)
            yield Offer(pool=name, os=GuestOs(image.os), image=pool.image, provides=frozenset(image.provides))


@contextmanager
def _sources(config: Config) -> Iterator[tuple[list[TaskFile], bool]]:
    """Yield the files to read, and whether to read the built-in suite before them.

    The fake desktop has none of the programs of the built-in tasks, so it has two suites of its own: `fake`, and the
    templates of `drawn`.
    """
    runs_guests = backend_of(config.hypervisor.uri).capabilities.runs_guests
    with ExitStack() as packaged:
        files = [_task_file(each, packaged) for each in config.tasks.suites]
        if not runs_guests:
            suite = resources("envd.drawn") / "suite.yaml"
            files.insert(0, TaskFile(packaged.enter_context(as_file(suite))))
        yield files, runs_guests


def _task_file(setting: str, packaged: ExitStack) -> TaskFile:
    """Resolve `PATH`, `SUITE=PATH` or `builtin:NAME`. Raises: ConfigError: the suite is unknown."""
    if setting.startswith(BUILTIN_TASKS):
        suites = optional_suites()
        name = setting.removeprefix(BUILTIN_TASKS)
        if name not in suites:
            known = f"envd has {', '.join(sorted(suites))}, and those of drawn desktops are loaded by --hypervisor fake"
            raise ConfigError(f"tasks.suites: unknown built-in suite {name!r}; {known}")
        return TaskFile(packaged.enter_context(as_file(suites[name])))
    scheme, _, directory = setting.partition(":")
    for system in task_systems():
        if system.read_directory and scheme == system.suite:
            return TaskFile(Path(directory), read=system.read_directory)
    suite, _, path = setting.partition("=") if not setting.startswith("/") else ("", "", setting)
    return TaskFile(Path(path), suite=suite) if suite else TaskFile(Path(path))


def optional_suites() -> dict[str, Traversable]:
    """Return the directories of the suites of `builtin:NAME`, which are loaded on request, by name."""
    directory = resources("envd.tasks") / "suites"
    return {each.name: each for each in directory.iterdir() if (each / f"{each.name}.yaml").is_file()}
