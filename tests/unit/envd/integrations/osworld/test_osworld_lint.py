"""The reasons why OSWorld tasks cannot run on a host."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.files import OsworldFile
from envd.integrations.osworld.lint import HostSupplies, Obstacle, findings

KNOWN = {
    "verbs": ["launch", "download", "login", "execute", "command", "chrome_open_tabs"],
    "getters": ["rule", "cloud_file", "vm_file", "active_tab_info", "googledrive_file"],
    "metrics": ["exact_match", "compare"],
}
HOST = HostSupplies(known=KNOWN, has_asset=lambda url: url.endswith("/here"), packages={GuestOs.LINUX: {"gimp"}})


def task(
    *steps: Mapping[str, Any],
    evaluator: Mapping[str, Any] | None = None,
    system: GuestOs = GuestOs.LINUX,
    domain: str = "gimp",
    **content: Any,
) -> OsworldFile:
    fields = {
        "id": "one",
        "instruction": "Do it.",
        "config": list(steps),
        "evaluator": evaluator or {"func": "exact_match", "result": {"type": "vm_file", "path": "/x", "dest": "x"}},
        **content,
    }
    return OsworldFile(suite="osworld", domain=domain, os=system, path=Path("one.json"), content=fields)


def step(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters}


def test_a_task_without_obstacles_can_run() -> None:
    assert findings(task(step("launch", command=["gimp"])), HOST) == ()
    assert findings(task(step("download", files=[{"url": "https://example.org/here", "path": "/x"}])), HOST) == ()
    file = task(evaluator={"func": "infeasible"}, instruction="Install https://example.org")
    assert findings(file, HOST) == ()
    assert findings(task(step("launch", command="ls /home/user/vlc.txt")), HOST) == ()
    assert findings(task(step("launch", command="pkill vlc")), HOST) != ()
    host = HostSupplies(known=None, has_asset=lambda _: True, packages={GuestOs.LINUX: None})
    assert findings(task(step("levitate"), domain="vlc"), host) == ()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            task(step("chrome_open_tabs", urls_to_open=3)),
            (Obstacle.MALFORMED, "TypeError(\"'int' object is not iterable\")"),
        ),
        (task(step("levitate")), (Obstacle.UNKNOWN_FUNCTION, "setup verb levitate")),
        (task(evaluator={"func": ["exact_match", "guess"]}), (Obstacle.UNKNOWN_FUNCTION, "metric guess")),
        (
            task(evaluator={"func": "compare", "expected": {"type": "oracle"}}),
            (Obstacle.UNKNOWN_FUNCTION, "getter oracle"),
        ),
        (task(step("login")), (Obstacle.CREDENTIALS, "login")),
        (task(proxy=True), (Obstacle.RECORDING, "its pages are on the live web")),
        (
            task(instruction="Open https://example.org"),
            (Obstacle.INTERNET, "its instruction says to download or to install"),
        ),
        (task(step("command", command="apt-get install x")), (Obstacle.INTERNET, "its setup installs or downloads")),
        (task(step("execute", command="sudo apt install x")), (Obstacle.INTERNET, "its setup installs or downloads")),
        (
            task(evaluator={"func": "compare", "result": {"type": "active_tab_info"}}),
            (Obstacle.PORT, "active_tab_info"),
        ),
        (
            task(step("download", files=[{"url": "https://example.org/gone", "path": "/x"}])),
            (Obstacle.ASSETS, "1 files are not fetched, such as https://example.org/gone"),
        ),
        (task(domain="vlc"), (Obstacle.APPLICATION, "vlc (package vlc-bin)")),
        (
            task(step("launch", command="thunderbird --headless")),
            (Obstacle.APPLICATION, "thunderbird (package thunderbird)"),
        ),
        (task(related_apps=["VSCode"]), (Obstacle.APPLICATION, "vs_code (package code)")),
        (task(system=GuestOs.WINDOWS), (Obstacle.IMAGE, "no image has windows")),
    ],
)  # fmt: skip
def test_each_obstacle_is_found(file: OsworldFile, expected: tuple[Obstacle, str]) -> None:
    assert findings(file, HOST) == (expected,)


def test_local_pages_need_no_internet_and_in_linux_no_port() -> None:
    steps = step("chrome_open_tabs", urls_to_open=["http://localhost/x", "chrome://settings"])
    assert findings(task(steps), HOST) == ()
    windows = HostSupplies(known=None, has_asset=lambda _: True, packages={GuestOs.WINDOWS: None})
    found = findings(task(steps, system=GuestOs.WINDOWS), windows)
    assert [obstacle for obstacle, _ in found] == [Obstacle.PORT]


def test_web_pages_need_a_recording_unless_a_pool_has_the_web() -> None:
    steps = step("chrome_open_tabs", urls_to_open=["https://example.org/"])
    file = task(steps, evaluator={"func": "compare", "result": {"type": "info_from_website"}})
    host = replace(HOST, known=None)
    assert findings(file, host) == (
        (Obstacle.RECORDING, "info_from_website"),
        (Obstacle.RECORDING, "it opens web pages"),
    )
    assert findings(file, replace(host, has_web=True)) == ()
