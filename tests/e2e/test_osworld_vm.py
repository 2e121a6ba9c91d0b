"""OSWorld's real package, task files, evaluators and DesktopEnv, on real guests.

Needs `envd image build osworld` and `envd osworld install --tasks DIR`, and fails without them.
"""

import asyncio
import json
import os
import site
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from cuaenv.actions import Action, Done, Fail, PressKeys, TypeText, Wait
from cuaenv.client import AsyncEnvClient, AsyncEpisode, View
from envd.api.server import ApiServer
from envd.base.config import HypervisorConfig
from envd.base.telemetry.metrics import Metrics
from envd.bench.episodes import SCRIPTS
from envd.episodes.service import EpisodeService
from envd.hypervisor.qemu.driver import LibvirtHypervisor
from envd.images.catalogue import ImageCatalogue
from envd.integrations.osworld.bridge import WorkerBridge
from envd.integrations.osworld.catalogue import IMAGE, desktop_task, osworld_tasks
from envd.integrations.osworld.environment import Environment
from envd.integrations.osworld.workers import OsworldWorkers, WorkerJob
from envd.pool.pool import MachinePool
from envd.pool.settings import PoolHost, PoolParameters
from envd.tasks.assets import AssetCache
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.evaluate import evaluate
from envd.tasks.fields import AssetRef
from envd.tasks.model import Task
from envd.tasks.setup import run_setup
from envd.tasks.setup_resources import SetupResources
from tests.support.leftovers import machine_leftovers
from tests.support.local_guestd import serve_guestd
from tests.support.program import run_program

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

TERMINAL = "desktop user@"
#: A file that shows that the line has been executed.
SOLVED = "/home/user/.solved"

#: Two tasks with downloads. The test generates similar files, because guests and many hosts have no network.
CALC_TASK = "3aaa4e37-dc91-482e-99af-132a612d40f3"
WRITER_TASK = "0e763496-b6bb-4508-a427-fad0b6c3e195"
TABLE = "Month,Total\nMay,12.5\nJune,7\n"
FILES = f"""
import csv, docx, openpyxl
table = {TABLE!r}
book = openpyxl.Workbook()
for month, total in csv.reader(table.splitlines()):
    book.active.append((month, total if total == "Total" else float(total)))
book.save("Export_Calc_to_CSV.xlsx")
open("Export_Calc_to_CSV.csv", "w").write(table)
text = docx.Document()
text.add_paragraph().add_run("The zoo is in the park.").font.name = "Comic Sans MS"
text.save("Dublin_Zoo_Intro.docx")
"""

#: Tasks without other downloads, and a line for the guest's terminal that solves each.
ORACLES = {
    **SCRIPTS,
    "e0df059f-28a6-4169-924f-b9623e7184cc": "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2",
    "ec4e3f68-9ea4-4c18-a5c9-69f89d1178b3": (
        "gsettings set org.gnome.shell favorite-apps \"['thunderbird.desktop', 'google-chrome.desktop']\""
    ),
    "215dfd39-f493-4bc3-a027-8a97d72c61bf": "echo 'qt-bgcone=0' >> ~/.config/vlc/vlcrc",
    "9195653c-f4aa-453d-aa95-787f6ccfaae9": "echo 'qt-max-volume=200' >> ~/.config/vlc/vlcrc",
    # GIMP overwrites its settings on exit.
    "7b7617bd-57cc-468e-9c91-40c4ec2bcb3d": (
        "pkill gimp; sleep 2; mkdir -p ~/.config/GIMP/2.10; echo '(undo-levels 100)' >> ~/.config/GIMP/2.10/gimprc"
    ),
    "7767eef2-56a3-4cea-8c9f-48c070c7d65b": (
        "pkill gimp; sleep 2; mkdir -p ~/.config/GIMP/2.10; echo '(theme \"Light\")' >> ~/.config/GIMP/2.10/gimprc"
    ),
}
#: The same for tasks whose slowly starting program would receive the keys: commands that write the expected file.
COMMANDS = {
    "8ba5ae7a-5ae5-4eab-9fcc-5dd4fe3abf89": "echo input-record-path=/home/user/Desktop >> ~/.config/vlc/vlcrc",
    "a5bbbcd5-b398-4c91-83d4-55e1e31bbb81": "echo qt-minimal-view=1 >> ~/.config/vlc/vlcrc",
    "d06f0d4d-2cd5-4ede-8de9-598629438c6e": "echo 'qt-slider-colours=9;9;9;9;9;9;9;9;9;9;9;9' >> ~/.config/vlc/vlcrc",
    "f3977615-2b45-4ac5-8bba-80c17dbe2a37": "echo one-instance-when-started-from-file=0 >> ~/.config/vlc/vlcrc",
    "d52d6308-ec58-42b7-a2c9-de80e4837b2b": (
        "pkill gimp; sleep 2; mkdir -p ~/.config/GIMP/2.10; echo '(hide-docks yes)' >> ~/.config/GIMP/2.10/sessionrc"
    ),
    # Exported by LibreOffice itself.
    CALC_TASK: "soffice --convert-to csv --outdir ~ ~/Export_Calc_to_CSV.xlsx",
    WRITER_TASK: (
        "pkill -9 soffice; mkdir /tmp/x; cd /tmp/x; python3 -m zipfile -e ~/Desktop/Dublin_Zoo_Intro.docx ."
        " && sed -i 's/Comic Sans MS/Times New Roman/g' word/document.xml"
        " && python3 -m zipfile -c ~/Desktop/Dublin_Zoo_Intro.docx *"
    ),
    # SIGKILL, because Chromium overwrites its settings on exit.
    "030eeff7-b492-4218-b312-701ec99ee0cc": (
        "pkill -9 chrom; mkdir -p ~/.config/google-chrome/Default;"
        " echo '{\"enable_do_not_track\":true}' > ~/.config/google-chrome/Default/Preferences"
    ),
    "2cd43775-7085-45d8-89fa-9e35c0a915cf": (
        'pkill -9 soffice; sed -i \'s#</oor:items>#<item oor:path="/org.openoffice.Office.Common/Save/Document">'
        '<prop oor:name="AutoSaveTimeIntervall" oor:op="fuse"><value>3</value></prop></item></oor:items>#\''
        " ~/.config/libreoffice/4/user/registrymodifications.xcu"
    ),
}
#: An infeasible task.
INFEASIBLE_TASK = "fe41f596-a71b-4c2f-9b2f-9dcd40b568c3"
#: Scores 1 if a file that a program keeps changing is the same in two reads.
TWICE_READ = Task.model_validate(
    {
        "task_id": "test/twice-read",
        "instruction": "Keep it.",
        "level": 1,
        "image": IMAGE,
        "checker": {
            "kind": "osworld",
            "func": "compare_text_file",
            "postconfig": [{"type": "execute", "parameters": {"command": ["touch", "/home/user/postconfig"]}}],
            "result": {"type": "vm_file", "path": "/home/user/now.txt", "dest": "first.txt"},
            "expected": {"type": "vm_file", "path": "/home/user/now.txt", "dest": "second.txt"},
        },
    }
)
#: Keeps changing it once `postconfig` has run, as fast as the guest can.
CHANGES = "while :; do [ -e postconfig ] && date +%N > next.txt && mv next.txt now.txt; done"
DESKTOP_ENV_TASK = "e0df059f-28a6-4169-924f-b9623e7184cc"


class StandIns(AssetCache):
    """An asset cache of files in a directory, by the last part of their URL."""

    def find(self, ref: AssetRef) -> Path:
        """See `AssetCache`."""
        return self.directory / ref.url.rpartition("/")[2]


@pytest.fixture(scope="module")
def environment(cache_dir: Path) -> Environment:
    found = Environment(cache_dir)
    assert found.is_installed, "run `envd osworld install`"
    assert found.tasks is not None, "run `envd osworld install --tasks DIR`"
    return found


@pytest.fixture(scope="module")
def assets(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AssetCache:
    directory = tmp_path_factory.mktemp("assets")
    subprocess.run([environment.python, "-c", FILES], cwd=directory, check=True)
    return StandIns(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(
    environment: Environment, assets: AssetCache, cache_dir: Path, template_dir: Path, vm_state_dir: Path
) -> AsyncIterator[str]:
    assert environment.tasks is not None
    workers = OsworldWorkers(environment.python)
    bridge = WorkerBridge(workers, assets=assets)
    image = ImageCatalogue(cache_dir).disk_image(IMAGE)
    hypervisor = await LibvirtHypervisor.open(
        HypervisorConfig(template_dir=template_dir), state_dir=vm_state_dir, cache_dir=cache_dir, images=[image]
    )
    settings = PoolParameters(name="osworld", capacity=3, size=1, allow_guest_access=True, always_running=True)
    service = EpisodeService(
        [MachinePool(settings, image=image, host=PoolHost(hypervisor=hypervisor))],
        tasks=TaskCatalogue([*osworld_tasks(environment.tasks), TWICE_READ], hidden=[desktop_task()]),
        run_setup=partial(run_setup, resources=SetupResources(bridge=bridge)),
        run_checkers=partial(evaluate, bridge=bridge),
    )
    server = ApiServer(service, listen="127.0.0.1:0", metrics=Metrics())
    await service.start()
    try:
        yield await server.start()
    finally:
        await server.stop()
        await service.aclose()
        await workers.aclose()
        await hypervisor.close()
    assert machine_leftovers(vm_state_dir) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(address: str) -> AsyncIterator[AsyncEnvClient]:
    async with AsyncEnvClient(address) as client:
        yield client


async def act(episode: AsyncEpisode, *actions: Action) -> None:
    result = await episode.step(*actions)
    assert result.errors == ()


async def type_line(episode: AsyncEpisode, line: str) -> None:
    """Open a terminal and type a line into it, in two steps; return when the line has been executed."""
    await act(episode, PressKeys(keys=("super", "t")))
    while TERMINAL not in (await episode.run_command(["wmctrl", "-l"])).stdout.decode():
        await asyncio.sleep(0.5)
    await act(episode, Wait(timedelta(seconds=2)), TypeText(text=f"({line}); touch {SOLVED}\n"))
    while (await episode.run_command(["test", "-f", SOLVED])).exit_code:
        await asyncio.sleep(1)


@pytest.mark.parametrize("osworld_id", [*ORACLES, *COMMANDS])
async def test_an_osworld_tasks_oracle_scores_one_and_doing_nothing_zero(
    client: AsyncEnvClient, osworld_id: str
) -> None:
    async with client.reset_group(f"osworld/{osworld_id}", size=2, view=View(encoding="none")) as (idle, solved):
        await act(idle, Done())
        assert (await idle.evaluate()).score == 0.0
        if osworld_id in ORACLES:
            await type_line(solved, ORACLES[osworld_id])
        else:
            done = await solved.run_command(["bash", "-c", COMMANDS[osworld_id]], timeout=timedelta(minutes=2))
            assert done.exit_code == 0, done.stderr.decode()
        await act(solved, Done())
        assert (await solved.evaluate()).score == 1.0


async def test_nothing_of_the_agent_runs_while_osworld_reads_files(client: AsyncEnvClient) -> None:
    async with client.reset(TWICE_READ.task_id, view=View(encoding="none")) as episode:
        start = f"cd ~; echo start > now.txt; (setsid bash -c '{CHANGES}' >/dev/null 2>&1 &)"
        assert (await episode.run_command(["bash", "-c", start])).exit_code == 0
        await act(episode, Done())
        assert (await episode.evaluate()).score == 1.0
        # It ran, and continues.
        before = await episode.read_file("/home/user/now.txt")
        assert before != b"start\n"


async def test_an_infeasible_osworld_task_scores_one_for_giving_up_and_zero_for_being_done(
    client: AsyncEnvClient,
) -> None:
    task_id = f"osworld/{INFEASIBLE_TASK}"
    endings: tuple[Action, ...] = (Fail(), Done())
    async with client.reset_group(task_id, size=2, view=View(encoding="none")) as episodes:
        scores = []
        for episode, last in zip(episodes, endings, strict=True):
            await act(episode, last)
            scores.append((await episode.evaluate()).score)
    assert scores == [1.0, 0.0]


async def test_64_concurrent_evaluations_of_one_task_agree_with_sequential_ones(
    environment: Environment, assets: AssetCache, tmp_path: Path
) -> None:
    assert environment.tasks is not None
    url = f"https://example.org/{CALC_TASK}/Export_Calc_to_CSV.csv"
    files = {"gold.csv": assets.find(AssetRef(url))}
    workers = OsworldWorkers(environment.python)
    with ExitStack() as stack:
        guest = serve_guestd(stack, tmp_path / "home")

        async def score(number: int) -> float:
            path = guest.home / f"{number}.csv"
            # Every third one is right; all have the same name in their cache directories.
            path.write_text(TABLE if number % 3 == 0 else TABLE.replace("May", f"May {number}"))
            evaluator = {
                "func": "compare_csv",
                "result": {"type": "vm_file", "path": str(path), "dest": "result.csv"},
                "expected": {"type": "cloud_file", "path": url, "dest": "gold.csv"},
            }
            job = WorkerJob(
                kind="evaluate", guest_url=guest.url, platform="Linux", screen_px=(1280, 800), time_s=300.0,
                evaluator=evaluator, files=files,
            )  # fmt: skip
            return float((await workers.run(job))["score"])

        one_by_one = [await score(number) for number in range(64)]
        at_once = await asyncio.gather(*map(score, range(64)))
    await workers.aclose()
    assert at_once == one_by_one == [1.0 if number % 3 == 0 else 0.0 for number in range(64)]


#: The loop of OSWorld's own runner: reset, steps of pyautogui, evaluate, and the same again after a reset.
AGENT = """
import json, sys, types
sys.modules["easyocr"] = types.ModuleType("easyocr")

import envd.integrations.osworld.provider
from desktop_env.desktop_env import DesktopEnv

task = json.load(open(sys.argv[1]))
env = DesktopEnv(
    provider_name="docker",
    action_space="pyautogui",
    screen_size=(1280, 800),
    cache_dir=sys.argv[2],
    require_a11y_tree=False,
)
empty = env.reset(task_config=task)["screenshot"]
assert empty.startswith(b"\\x89PNG"), "no screenshot"
observation, *_ = env.step("pyautogui.hotkey('win', 't')")
while observation["screenshot"] == empty:
    observation, *_ = env.step("WAIT")
env.step("WAIT")
env.step("pyautogui.typewrite('mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2', interval=0.02)")
env.step("pyautogui.press('enter')")
_, _, done, _ = env.step("DONE")
solved = env.evaluate()
env.reset(task_config=task)
env.step("DONE")
print(json.dumps({"done": done, "solved": solved, "after_revert": env.evaluate()}))
env.close()
"""


async def test_an_unmodified_desktop_env_runs_on_our_forks(
    address: str, environment: Environment, tmp_path: Path
) -> None:
    assert environment.tasks is not None
    # The packages that `pip install envd-trainer` would install: gRPC, protobuf and the bindings.
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("grpc", "google", "typing_extensions.py"):
        (packages / name).symlink_to(Path(site.getsitepackages()[0]) / name)
    roots = [path for path in sys.path if (Path(path) / "envd").is_dir() or (Path(path) / "cuaenv").is_dir()]
    import_path = os.pathsep.join([str(packages), *roots])
    program = tmp_path / "agent.py"
    program.write_text(AGENT)
    done = await run_program(
        environment.python,
        program,
        environment.tasks / "examples" / "os" / f"{DESKTOP_ENV_TASK}.json",
        tmp_path / "cache",
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": import_path, "ENVD_ADDRESS": address},
    )
    assert done.status == 0, done.err[-3000:]
    assert json.loads(done.out.splitlines()[-1]) == {"done": True, "solved": 1.0, "after_revert": 0.0}
