"""The desktop suite: complete, consistent, and never solved by doing nothing."""

from cuaenv.actions import Action, Click, Done, Drag, Fail, MouseDown, Move, PressKeys, Scroll, Wait
from cuaenv.results import CommandResult
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.checker_union import AnyLeafChecker, leaves
from envd.tasks.checkers.files import FileText
from envd.tasks.checkers.session import AgentAnswer
from envd.tasks.checkers.unchanged import Unchanged
from envd.tasks.evaluate import evaluate, remember_start
from envd.tasks.model import Task
from envd.tasks.oracle import split_step, without_target
from envd.tasks.queries import OpenWindow
from envd.tasks.verbs import Launch, Open, WriteSetupFile
from tests.support.memory_desktop import MemoryDesktop

CATALOGUE = TaskCatalogue.load()
PLAIN = CATALOGUE.list()
TASKS = [
    *PLAIN,
    *(CATALOGUE.get(f"{task.task_id}?seed=1") for task in PLAIN if CATALOGUE.variant_count(task.task_id) > 1),
]

WIDTH_PX, HEIGHT_PX = 1280, 800


def actions(task: Task) -> list[Action]:
    return [without_target(action) for step in task.oracle for action in split_step(step)[0]]


def test_the_suite_is_graded_and_varied() -> None:
    assert {task.level for task in PLAIN} == {1, 2, 3, 4, 5}
    tags = {tag for task in PLAIN for tag in task.tags}
    assert tags >= {"answer", "menu", "dialog", "mouse", "unicode", "clipboard", "formula", "windows"}
    assert sum(task.infeasible for task in PLAIN) == 1
    assert any(answers(task) for task in TASKS)
    assert len({task.instruction for task in PLAIN}) == len(PLAIN)


def test_an_oracle_ends_the_episode_and_waits_for_conditions_only() -> None:
    for task in TASKS:
        assert isinstance(actions(task)[-1], Fail if task.infeasible else Done), task.task_id
        assert not any(isinstance(action, Wait) for action in actions(task)), task.task_id


def test_an_oracle_stays_on_the_screen() -> None:
    for task in TASKS:
        points: list[tuple[int | None, int | None]] = []
        for action in actions(task):
            match action:
                case Click() | Scroll() | Move() | MouseDown():
                    points.append((action.x, action.y))
                case Drag():
                    points += [(action.start_x, action.start_y), (action.end_x, action.end_y)]
                case _:
                    pass
        for x, y in points:
            assert (x is None) == (y is None), task.task_id
            assert x is None or 0 <= x < WIDTH_PX, task.task_id
            assert y is None or 0 <= y < HEIGHT_PX, task.task_id


def test_a_mouse_only_task_is_solved_with_the_mouse_alone() -> None:
    for task in TASKS:
        if "only the mouse" in task.instruction:
            assert not any(isinstance(action, PressKeys) for action in actions(task)), task.task_id
        uses_mouse = any(isinstance(action, Click | Drag | Scroll | MouseDown) for action in actions(task))
        assert ("mouse" in task.tags) <= uses_mouse, task.task_id


async def score(task: Task, desktop: MemoryDesktop, ending: Done | Fail | None) -> float:
    """Score a task at once after its start; each check has evidence."""
    await remember_start(task, desktop)
    evaluation = await evaluate(task, desktop, last_action=ending, timeout_s=60.0)
    assert all(check.evidence for check in evaluation.checks), task.task_id
    return evaluation.score


async def test_doing_nothing_scores_zero_on_an_empty_guest_and_after_the_setup() -> None:
    for task in TASKS:
        for desktop, ending in ((empty(), None), (empty(), Done()), (set_up(task), Done())):
            assert await score(task, desktop, ending) == 0.0, task.task_id


async def test_an_oracle_ends_with_the_right_answer() -> None:
    answered = [task for task in TASKS if answers(task) or task.infeasible]
    assert answered
    for task in answered:
        ending = actions(task)[-1]
        assert isinstance(ending, Done | Fail), task.task_id
        assert await score(task, MemoryDesktop(), ending) == 1.0, task.task_id


async def test_the_exactly_expected_files_score_one() -> None:
    scored = 0
    for task in TASKS:
        checks = [check for check in leaves_of(task) if not isinstance(check, Unchanged)]
        texts = [check for check in checks if isinstance(check, FileText) and check.equals is not None]
        if not texts or len(texts) < len(checks):
            continue
        desktop = set_up(task)
        await remember_start(task, desktop)
        for check in texts:
            desktop.files[check.path] = (check.equals or "").encode()
        evaluation = await evaluate(task, desktop, last_action=Done(), timeout_s=60.0)
        assert evaluation.score == 1.0, task.task_id
        scored += 1
    assert scored > 20


async def test_a_lost_file_of_the_user_scores_zero() -> None:
    lost = 0
    for task in TASKS:
        changed = {path for check in leaves_of(task) if isinstance(check, Unchanged) for path in check.excluded}
        written = [verb.path for verb in task.setup if isinstance(verb, WriteSetupFile)]
        mine = [path for path in written if path.startswith("/home/user/") and path not in changed]
        if not mine or task.infeasible:
            continue
        desktop = set_up(task)
        await remember_start(task, desktop)
        del desktop.files[mine[0]]
        evaluation = await evaluate(task, desktop, last_action=None, timeout_s=60.0)
        assert mine[0] in evaluation.checks[-1].evidence, task.task_id
        lost += 1
    assert lost > 20


def leaves_of(task: Task) -> list[AnyLeafChecker]:
    return [] if task.checker is None else list(leaves(task.checker))


def answers(task: Task) -> bool:
    return any(isinstance(check, AgentAnswer) for check in leaves_of(task))


def empty() -> MemoryDesktop:
    """Return a guest in which no task is solved."""
    desktop = MemoryDesktop()
    for program, output in (("ssconvert", b"Item,Price\n"), ("python3", b"false\n"), ("bash", b"")):
        desktop.answers[(program,)] = CommandResult(exit_code=0, stdout=output, stderr=b"")
    desktop.answers["sh", "-c", 'test -x "$1" && "$1" || exit 1'] = CommandResult(exit_code=1, stdout=b"", stderr=b"")
    return desktop


def set_up(task: Task) -> MemoryDesktop:
    """Return a guest with the files and windows of a task's setup."""
    desktop = empty()
    for number, verb in enumerate(task.setup):
        match verb:
            case WriteSetupFile():
                desktop.files[verb.path] = verb.data()
            case Launch(argv=argv):
                desktop.windows.append(
                    OpenWindow(window_id=f"0x{number:08x}", wm_class=f"{argv[0]}.{argv[0].title()}", title=argv[-1])
                )
            case Open(path=path):
                desktop.windows.append(
                    OpenWindow(window_id=f"0x{number:08x}", wm_class="mousepad.Mousepad", title=f"{path} - Mousepad")
                )
            case _:
                pass
    return desktop
