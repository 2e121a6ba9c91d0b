"""The tasks that `envd tasks verify` plays, and how it judges their scores."""

from pathlib import Path

import pytest
from rich.console import Console

from envd.authoring.attack.mutants import attack_digest
from envd.authoring.verification import PolicyResult, Verification, VerifyingPolicy, verify_config
from envd.base.config_sources import load
from envd.base.errors import ConfigError, TaskNotFound
from envd.cli.tasks_verify import choose, image_of, left_out_of, not_attacked
from envd.hypervisor.machine import Firmware, GuestOs
from envd.images.catalogue import ImageCatalogue, ImportedDisk
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.formats.entries import Problem
from envd.tasks.model import Task


def task(task_id: str, *, solved: bool = True) -> Task:
    oracle = [["fail"]] if solved else []
    return Task.model_validate(
        {"task_id": task_id, "instruction": "i", "level": 1, "infeasible": True, "oracle": oracle}
    )


CATALOGUE = TaskCatalogue([task("a/one"), task("a/two", solved=False), task("ab/one")])


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ([], ["a/one", "ab/one"]),
        (["a/"], ["a/one", "a/two"]),
        (["ab/one", "a/", "a/one"], ["ab/one", "a/one", "a/two"]),
    ],
)
def test_tasks_are_selected_by_id_and_by_suite_without_duplicates(wanted: list[str], chosen: list[str]) -> None:
    assert [each.task_id for each in choose(CATALOGUE, wanted)] == chosen


def test_the_starts_of_feasible_tasks_that_can_run_are_verified_without_oracles() -> None:
    checker = {"kind": "file_absent", "path": "/a"}
    feasible = [
        Task.model_validate({"task_id": f"a/{name}", "instruction": "i", "level": 1, "checker": checker})
        for name in ("runs", "stuck")
    ]
    obstacles = {"a/stuck": ("internet: x",)}
    catalogue = TaskCatalogue([task("a/one"), *feasible], find_obstacles=obstacles.get)
    assert [each.task_id for each in choose(catalogue, [], starts=True)] == ["a/runs"]


def test_a_task_that_changed_since_its_attack_fails_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = {"kind": "file_absent", "path": "/a"}
    one, other, free = (
        Task.model_validate({"task_id": name, "instruction": "i", "level": 1, "checker": checker})
        for name in ("a/one", "a/two", "b/one")
    )
    passed = {"a/one": attack_digest(one, runs_guests=True), "a/two": "0123456789abcdef"}
    monkeypatch.setattr("envd.cli.tasks_verify.read_passed", lambda _: passed)
    assert not_attacked([one, other, free], runs_guests=True) == ("a/two",)
    # On another kind of desktop other mutants are played.
    assert not_attacked([one], runs_guests=False) == ("a/one",)
    verification = Verification(accelerator="kvm", results=(), not_attacked=("a/two",))
    assert not verification.passed
    assert verification.as_json()["not_attacked"] == ["a/two"]


def test_a_wanted_task_that_could_not_be_loaded_fails_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    broken, other, nameless = (
        Problem(where="f.yaml:3", task_id=task_id, field="level", message="must be at most 5")
        for task_id in ("a/broken", "b/broken", "")
    )
    catalogue = TaskCatalogue([task("a/one"), broken, other, nameless])
    assert left_out_of(catalogue, []) == [broken, other, nameless]
    assert left_out_of(catalogue, ["a/"]) == [broken, nameless]
    assert left_out_of(catalogue, ["a/one"]) == [nameless]
    verification = Verification(accelerator="kvm", results=(), left_out=(str(broken),))
    assert not verification.passed
    assert verification.as_json()["left_out"] == ["f.yaml:3: task a/broken: level: must be at most 5"]
    verification.print(Console())
    assert "not played: f.yaml:3: task a/broken" in capsys.readouterr().out


def test_tasks_of_several_images_are_refused(tmp_path: Path) -> None:
    images = ImageCatalogue(tmp_path)
    one, other = task("a/one"), task("a/two").model_copy(update={"image": "osworld"})
    assert [image_of(tasks, images) for tasks in ([one], [other], [])] == ["", "osworld", ""]
    with pytest.raises(ConfigError, match=r"several images \(the default one for linux, osworld\)"):
        image_of([one, other], images)


def test_tasks_for_windows_are_played_on_the_only_image_with_windows(tmp_path: Path) -> None:
    images = ImageCatalogue(tmp_path / "cache")
    disk = tmp_path / "disk.qcow2"
    disk.write_bytes(b"QFI\xfb")
    tasks = [task("a/one").model_copy(update={"os": GuestOs.WINDOWS})]

    def add(name: str, os: GuestOs) -> None:
        images.import_file(name, ImportedDisk(file=disk, os_family=os, firmware=Firmware.UEFI))

    add("debian", GuestOs.LINUX)
    with pytest.raises(ConfigError, match="windows"):
        image_of(tasks, images)
    add("win11", GuestOs.WINDOWS)
    assert image_of(tasks, images) == "win11"
    add("wine", GuestOs.WINDOWS)
    with pytest.raises(ConfigError, match="win11, wine"):
        image_of(tasks, images)


@pytest.mark.parametrize("name", ["b/", "a/three", "a"])
def test_selecting_an_unknown_task_or_suite_fails(name: str) -> None:
    with pytest.raises(TaskNotFound):
        choose(CATALOGUE, ["a/one", name])


@pytest.mark.parametrize(
    ("policy", "score", "passed"),
    [
        (VerifyingPolicy.ORACLE, 1.0, True),
        (VerifyingPolicy.ORACLE, 0.99, False),
        (VerifyingPolicy.ORACLE, None, False),
        (VerifyingPolicy.NULL, 0.0, True),
        (VerifyingPolicy.NULL, 0.1, False),
        (VerifyingPolicy.NULL, None, False),
    ],
)
def test_only_the_exact_score_passes(policy: VerifyingPolicy, score: float | None, passed: bool) -> None:
    result = PolicyResult(task_id="a/one", policy=policy, score=score)
    assert result.passed is passed
    verification = Verification(accelerator="fake", results=(result,))
    assert [verification.count(each) for each in VerifyingPolicy] == [
        passed and policy is each for each in VerifyingPolicy
    ]
    assert len(verification.failures) == (not passed)


def test_a_daemon_that_verifies_has_machines_for_all_and_the_settings_of_its_pool() -> None:
    pool = verify_config(load(flags={"hypervisor.uri": "fake"}), parallel_count=3).pools["desktop"]
    assert (pool.size, pool.capacity) == (3, 9)
    settings = load(environ={"ENVD_POOLS__WIN11__MEMORY_MIB": "4096", "ENVD_POOLS__DESKTOP__MEMORY_MIB": "2048"})
    [(_, pool)] = verify_config(settings, parallel_count=1, image="win11").pools.items()
    assert (pool.image, pool.memory_mib, pool.size, pool.allow_guest_access) == ("win11", 4096, 1, True)
    [(_, pool)] = verify_config(settings, parallel_count=1).pools.items()
    assert (pool.image, pool.memory_mib) == ("desktop", 2048)
