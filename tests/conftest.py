"""Shared fixtures: the desktop image, a short state directory for libvirt's embedded driver, and a parallel soak."""

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Imported before libvirt is used: gRPC's fork handlers conflict with the embedded driver.
import envd.api

# Imported before libvirt is loaded, because it sets libvirt's log output.
import envd.hypervisor
from envd.base.config_sources import load
from envd.images.catalogue import Image, ImageCatalogue
from tests.support import containers, progress
from tests.support.proofs import marker_names
from tests.support.real_desktops import QEMU, REAL_BACKENDS, Backend
from tests.support.soak import SoakProcess, SoakRun

assert envd.api
assert envd.hypervisor
_TESTS = Path(__file__).parent
#: Directories of tests that wait for processes and limits; the first ones most.
_WAITING = ("e2e", "contract")
#: Lines of a daemon's log that a failed test shows.
_LOG_LINES = 60
# A shell makes background jobs ignore SIGINT, which processes started by tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline for examples: a busy host can stall for seconds during one.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run, so that a run fails only for a change. With --long they are random.
settings.register_profile("usual", untimed, max_examples=40, derandomize=True)
settings.register_profile("thorough", untimed, max_examples=200)
settings.load_profile("usual")
# For detailed assertion errors in the contract suites.
for module in (
    "tests.support.guestd_contract",
    "tests.support.machine_contract.forks",
    "tests.support.machine_contract.machine",
    "tests.support.machine_contract.fixtures",
):
    pytest.register_assert_rewrite(module)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the soak and the faults on real machines as well")
    parser.addoption("--progress", type=Path, metavar="FILE", help="note results in FILE; leave out what passed in it")
    parser.addoption("--lane", metavar="K/N", help="run the K-th of N parts, of whole modules")


def pytest_configure(config: pytest.Config) -> None:
    """Select the Hypothesis profile, before test modules are imported; note results if asked to."""
    if config.getoption("--long"):
        settings.load_profile("thorough")
    if file := config.getoption("--progress"):
        config.pluginmanager.register(progress.of(config, file))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Examine the millions of objects that collection makes for garbage neither now nor later: 9 % of the CPU time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files so that all processors are used until the end; deselect long tests."""
    places = _places(items)
    items.sort(key=lambda item: places[item.path])
    if lane := config.getoption("--lane"):
        own = set(progress.in_lane(lane, items))
        config.hook.pytest_deselected(items=[item for item in items if item not in own])
        items[:] = [item for item in items if item in own]
    if config.getoption("--long"):
        return
    long = [item for item in items if "long" in marker_names(item)]
    items[:] = [item for item in items if "long" not in marker_names(item)]
    config.hook.pytest_deselected(items=long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the log of each daemon whose fixture a failed test used."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(log := getattr(value, "log_file", None), Path):
                lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                report.sections.append((f"log of {name}", "\n".join(lines)))
    return report


def _places(items: list[pytest.Item]) -> dict[Path, int]:
    """Return the place of each file: half of those that wait, then each other one with two that compute, then the rest.

    So the processors are used while tests wait, and the last files are short.
    """
    with_soak = {item.path for item in items if _asks_for_soak(item)}
    waiting: list[list[Path]] = [[] for _ in _WAITING]
    late, computing = [], []
    for path in {item.path: None for item in items}:
        directory = path.relative_to(_TESTS).parts[0]
        if path in with_soak:
            late.append(path)  # the soak plays for a minute, which has passed by then
        elif directory in _WAITING:
            waiting[_WAITING.index(directory)].append(path)
        else:
            computing.append(path)
    ordered = [*chain(*waiting), *late]
    places = {path: 2 * index for index, path in enumerate(ordered)}
    return places | {path: len(ordered) + index for index, path in enumerate(computing)}


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Undo the log setup of commands that a test ran: their handler would write to a stream that the test closed."""
    root, ours = logging.getLogger(), logging.getLogger("envd")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in [known for known in root.handlers if known not in handlers]:
        if isinstance(handler, logging.StreamHandler) and not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Return the image cache that `make image` fills."""
    return load().cache_dir


@pytest.fixture(scope="session")
def desktop_image(cache_dir: Path) -> Image:
    """Return the built desktop image. Fails if it is missing, so that no VM test is skipped silently."""
    return ImageCatalogue(cache_dir).get("desktop")


@pytest.fixture(scope="session")
def template_dir(cache_dir: Path) -> Path:
    """Return the directory of templates kept between test runs, which saves a boot of about 1 min."""
    return cache_dir / "templates"


@pytest.fixture(scope="session")
def qemu(desktop_image: Image, cache_dir: Path, template_dir: Path) -> Backend:
    """Return QEMU, for tests of what only virtual machines do."""
    assert desktop_image.name == "desktop"
    return Backend(uri=QEMU, cache_dir=cache_dir, template_dir=template_dir)


@pytest.fixture(scope="module", params=REAL_BACKENDS)
def real_backend(request: pytest.FixtureRequest, cache_dir: Path, template_dir: Path) -> Backend:
    """Return a backend for tests that all real desktops pass: containers, and with --long QEMU."""
    backend = Backend(uri=request.param, cache_dir=cache_dir, template_dir=template_dir)
    if not backend.is_qemu:
        containers.desktop_image()
    return backend


@pytest.fixture(scope="session")
def vm_state_dir() -> Iterator[Path]:
    """Create the state directory for machines of this process, which can embed libvirt under only one root."""
    # Below /tmp instead of pytest's deep directory: paths of Unix sockets are limited to 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="envd-t-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@contextmanager
def _short_directory() -> Iterator[Path]:
    """Create a directory below /tmp: paths of Unix sockets are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="envd-t-", dir="/tmp") as name:
        Path(name).chmod(0o755)  # libvirt and QEMU access it as other users
        yield Path(name)


@pytest.fixture
def short_dir(desktop_image: Image) -> Iterator[Path]:
    """Create a directory for the daemons of one test with real machines."""
    assert desktop_image.name == "desktop"
    with _short_directory() as directory:
        yield directory


@pytest.fixture
def daemons() -> Iterator[ExitStack]:
    """End the daemons that a test enters and does not end: last parameter, because their directory goes afterwards."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def module_dir(desktop_image: Image) -> Iterator[Path]:
    """Create a directory for the daemons of one module with real machines."""
    assert desktop_image.name == "desktop"
    with _short_directory() as directory:
        yield directory


@pytest.fixture(scope="session", autouse=True)
def soak_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """Start a soak of a minute before the first test (a third of a core); return its output directory."""
    if not any(_asks_for_soak(item) for item in request.session.items):
        yield None
        return
    # With several test processes, the first one starts it and another may read its report.
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "soak"
    try:
        directory.mkdir()
    except FileExistsError:
        yield directory
        return
    soak = SoakProcess(directory, "--minutes", "1", "--machines", "3", "--seed", "ci")
    yield directory
    if request.session.shouldstop or request.session.shouldfail:
        soak.interrupt()
    soak.join()


@pytest.fixture
def soak(soak_dir: Path | None) -> SoakRun:
    """Return the soak that runs in parallel with the tests."""
    assert soak_dir is not None
    return SoakRun(soak_dir)


def _asks_for_soak(item: pytest.Item) -> bool:
    return "soak" in getattr(item, "fixturenames", ())
