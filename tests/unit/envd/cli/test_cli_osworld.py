"""`envd osworld` against a cache in a temporary directory."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envd.base.checks import Status
from envd.base.config import Config
from envd.base.sandbox import probe
from envd.base.sandbox.cgroup import Hierarchy
from envd.base.sandbox.probe import check_sandbox, sandbox_problem
from envd.cli.app import app
from envd.daemon.suites import load_tasks
from envd.integrations.osworld.environment import Environment, check_osworld

TASK = {
    "id": "0001-a",
    "instruction": "Do it.",
    "related_apps": ["gimp"],
    "config": [{"type": "launch", "parameters": {"command": ["gimp"]}}],
    "evaluator": {"func": "exact_match", "result": {"type": "rule", "rules": {}}},
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=tmp_path / "cache")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, task in (("one", TASK), ("two", {**TASK, "id": "0002-b", "proxy": True})):
        path = tmp_path / "checkout" / "evaluation_examples" / "examples" / "gimp" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(task))
    return tmp_path / "checkout"


def run(config: Config, *args: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["osworld", *args, "--cache-dir", str(config.cache_dir)])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def register(config: Config, checkout: Path) -> None:
    Environment(config.cache_dir).register_tasks(str(checkout), progress=lambda stage, fraction: None)


@pytest.fixture
def registered(config: Config, checkout: Path) -> None:
    register(config, checkout)


def build_image(
    config: Config, *packages: str, digest: str = "0" * 64, name: str = "osworld", os: str = "linux"
) -> None:
    """Register an image as a build leaves it, by what the catalogue reads."""
    directory = config.cache_dir / "images" / name / digest[:16]
    directory.mkdir(parents=True)
    current = directory.parent / "current"
    current.unlink(missing_ok=True)
    current.symlink_to(directory.name)
    manifest = {"name": name, "digest": digest, "disk": "disk.qcow2", "disk_sha256": "0" * 64, "os": os}
    (directory / "image.json").write_text(json.dumps(manifest))
    (directory / "packages.txt").write_text("".join(f"{package} 1.0\n" for package in packages))


def install(config: Config) -> None:
    python = Environment(config.cache_dir).python
    python.parent.mkdir(parents=True)
    python.touch()


def put_asset(config: Config, url: str, data: bytes) -> None:
    """Put a file into the cache as `envd tasks fetch` does."""
    digest = hashlib.sha256(data).hexdigest()
    entry = {"url": url, "sha256": digest, "size_bytes": len(data)}
    name = f"{hashlib.sha256(url.encode()).hexdigest()}.json"
    for path, content in (("url/" + name, json.dumps(entry).encode()), (f"sha256/{digest}", data)):
        (config.asset_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (config.asset_dir / path).write_bytes(content)


def test_a_wrong_path_of_tasks_is_reported_before_installing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "install", lambda *_, **__: pytest.fail("it downloads 1.5 GB"))
    assert "neither a directory nor a URL" in run(config, "install", "--tasks", "no-such-directory", status=1)


def test_lint_says_of_each_task_whether_it_can_run_and_why_not(config: Config, checkout: Path) -> None:
    register(config, checkout)
    build_image(config, "gimp")
    printed: dict[str, Any] = json.loads(run(config, "lint", "--json"))
    assert (printed["total"], printed["runnable"]) == (2, 1)
    one, two = printed["tasks"]
    assert (one["task_id"], one["can_run"], one["obstacles"]) == ("osworld/0001-a", True, [])
    assert (two["task_id"], two["can_run"]) == ("osworld/0002-b", False)
    assert [obstacle["kind"] for obstacle in two["obstacles"]] == ["web recording"]
    assert printed["obstacles"]["web recording"] == 1
    assert "1 of 2 can run" in run(config, "lint")
    assert json.loads(run(config, "lint", "--json", "--domain", "vlc"))["total"] == 0


def test_lint_prints_whole_ids_if_it_does_not_write_to_a_terminal(
    config: Config, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    task_id = "030eeff7-b492-4218-b312-701ec99ee0cc"
    path = checkout / "evaluation_examples" / "examples" / "gimp" / "two.json"
    path.write_text(json.dumps({**TASK, "id": task_id, "proxy": True, "instruction": "Do it. " * 50}))
    register(config, checkout)
    (line,) = (line for line in run(config, "lint").splitlines() if task_id in line)
    assert line.split()[:3] == [f"osworld/{task_id}", "gimp", "no"]
    assert "its pages are on the live web; image: no image has linux" in line


def test_lint_goes_by_the_image_that_is_current_and_not_by_an_older_one(config: Config, checkout: Path) -> None:
    register(config, checkout)
    build_image(config, "bc", digest="f" * 64)
    build_image(config, "gimp", digest="0" * 64)
    assert "1 of 2 can run" in run(config, "lint")


def test_an_image_with_wine_does_not_run_tasks_for_windows(config: Config, checkout: Path) -> None:
    path = checkout / "evaluation_examples" / "examples_windows" / "excel" / "one.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**TASK, "id": "0003-c"}))
    register(config, checkout)
    build_image(config, "wine", name="wine", os="windows")
    found = {task["task_id"]: task for task in json.loads(run(config, "lint", "--json"))["tasks"]}
    assert [obstacle["kind"] for obstacle in found["osworld-windows/0003-c"]["obstacles"]] == ["image"]


def test_lint_without_an_image_says_so(config: Config, registered: None) -> None:
    printed = json.loads(run(config, "lint", "--json"))
    kinds = {obstacle["kind"] for task in printed["tasks"] for obstacle in task["obstacles"]}
    assert kinds == {"image", "web recording"}


def test_lint_without_task_files_names_the_way_out(config: Config) -> None:
    assert "envd osworld install --tasks DIR" in run(config, "lint", status=1)


def test_registered_tasks_are_served_but_not_by_the_fake(config: Config, checkout: Path) -> None:
    builtin_count = len(load_tasks(config))
    register(config, checkout)
    assert len(load_tasks(config)) == builtin_count + 2
    assert load_tasks(config).get("osworld/0001-a").image == "osworld"
    assert len(load_tasks(config, include_osworld=False)) == builtin_count
    fake = config.model_copy(update={"hypervisor": config.hypervisor.model_copy(update={"uri": "fake"})})
    assert not [task for task in load_tasks(fake).list() if task.task_id.startswith("osworld")]


def test_served_tasks_have_the_obstacles_that_lint_reports(config: Config, registered: None) -> None:
    build_image(config, "gimp")
    tasks = load_tasks(config)
    assert tasks.obstacles(tasks.get("osworld/0001-a")) == ()
    assert tasks.obstacles(tasks.get("osworld/0002-b")) == ("web recording: its pages are on the live web",)
    assert tasks.obstacles(tasks.get("osworld/desktop")) is None
    assert tasks.obstacles(tasks.get("desktop/delete-line")) is None
    unchecked = config.tasks.model_copy(update={"check_obstacles": False})
    others = load_tasks(config.model_copy(update={"tasks": unchecked}))
    assert others.obstacles(others.get("osworld/0002-b")) is None


def test_tasks_show_prints_the_domain_and_the_obstacles(config: Config, checkout: Path, tmp_path: Path) -> None:
    register(config, checkout)
    build_image(config, "gimp")
    file = tmp_path / "envd.toml"
    file.write_text(f'cache_dir = "{config.cache_dir}"\n')
    result = CliRunner().invoke(app, ["tasks", "show", "osworld/0002-b", "--config", str(file)])
    assert result.exit_code == 0, result.output
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines()}
    assert shown["domain"] == "gimp"
    assert shown["runnable"] == "False"
    assert shown["obstacle"] == "web recording: its pages are on the live web"


def test_a_file_that_is_fetched_while_the_daemon_runs_is_no_longer_an_obstacle(config: Config, tmp_path: Path) -> None:
    url = "https://example.org/a.txt"
    steps = [{"type": "download", "parameters": {"files": [{"url": url, "path": "/a.txt"}]}}]
    path = tmp_path / "checkout" / "evaluation_examples" / "examples" / "gimp" / "one.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**TASK, "config": steps}))
    register(config, tmp_path / "checkout")
    build_image(config, "gimp")
    tasks = load_tasks(config)
    assert tasks.obstacles(tasks.get("osworld/0001-a")) == (f"assets: 1 files are not fetched, such as {url}",)
    put_asset(config, url, b"content")
    assert tasks.obstacles(tasks.get("osworld/0001-a")) == ()


def test_the_names_that_the_installation_recorded_show_missing_functions(config: Config, checkout: Path) -> None:
    register(config, checkout)
    build_image(config, "gimp")
    directory = Environment(config.cache_dir).directory
    directory.mkdir(parents=True)
    (directory / "envd-names.json").write_text(json.dumps({"verbs": [], "getters": ["rule"], "metrics": []}))
    tasks = load_tasks(config)
    assert tasks.obstacles(tasks.get("osworld/0001-a")) == (
        "unknown function: setup verb launch",
        "unknown function: metric exact_match",
    )


def test_doctor_warns_of_tasks_that_nothing_can_run(config: Config, checkout: Path) -> None:
    assert check_osworld(config).status is Status.OK
    register(config, checkout)
    check = check_osworld(config)
    assert (check.status, check.fix) == (Status.WARN, "`envd osworld install`")
    install(config)
    assert check_osworld(config).status is Status.OK


def test_doctor_says_what_control_groups_do_not_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "sandbox_problem", lambda: "")
    version_1 = Hierarchy("/sys/fs/cgroup", "memory.limit_in_bytes")
    version_2 = Hierarchy("/sys/fs/cgroup", "memory.max", limits_cpu=True)
    for hierarchy, part in (
        (None, "memory and processors are limited per process only"),
        (version_1, "; processors are limited per process only"),
        (version_2, "memory and processors are limited per job"),
    ):
        monkeypatch.setattr(probe, "find_hierarchy", lambda found=hierarchy: found)
        assert part in check_sandbox().detail


def test_doctor_warns_where_no_sandbox_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "sandbox_problem", lambda: "SandboxError: no sandbox: unshare: Operation not permitted")
    check = check_sandbox()
    assert check.status is Status.WARN
    assert "unshare: Operation not permitted" in check.detail


def test_this_host_can_make_a_sandbox_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox_problem() == ""
    monkeypatch.setattr(probe, "_ENTER_SANDBOX", "raise SystemExit('unshare: Operation not permitted')")
    assert sandbox_problem() == "unshare: Operation not permitted"
