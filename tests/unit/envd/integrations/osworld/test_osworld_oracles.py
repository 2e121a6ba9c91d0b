"""Scripts for OSWorld's tasks that run offline: both sides of `envd tasks parity` can play them."""

from pathlib import Path

from envd.authoring.parity.scripts import read_trajectories
from tests.osworld.oracles import INFEASIBLE, LINES, WINDOWS, write

SCREEN_PX = (1280, 800)


def test_each_task_has_a_solution_a_mutant_and_a_way_to_give_up(tmp_path: Path) -> None:
    write(tmp_path)
    scripts = read_trajectories(tmp_path)
    assert scripts.keys() == {*LINES, *WINDOWS, *INFEASIBLE}
    for task, found in scripts.items():
        names = {each.name.removeprefix("trajectory ").partition("/")[0] for each in found}
        assert names == ({"oracle", "almost"} if task in INFEASIBLE else {"oracle", "almost", "give-up"})
        # Also parses each call.
        played = {tuple(map(str, each.steps_on(SCREEN_PX))) for each in found}
        assert len(played) == len(found)
        # pyautogui types `>` for it, and OSWorld corrects that in some calls only.
        assert not any("<" in call for each in found for call in each.calls)
