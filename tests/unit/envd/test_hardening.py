"""Properties of the code and of QEMU's configuration that limit what a compromised guest or client can do."""

import ast
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

import envd
from envd.hypervisor.qemu.host import prepare_embedded
from envd.hypervisor.qemu.user import Account, QemuUser

SOURCE = Path(envd.__file__).parent
#: Packages between the network and the hypervisor, which handle input of clients and guests.
EXPOSED = ("api", "console", "desktop", "episodes", "pool", "tasks")
#: Names whose users can start a program on the host.
STARTERS = {
    "subprocess", "pty", "multiprocessing", "create_subprocess_exec", "create_subprocess_shell", "system", "popen",
    "fork", "forkpty", "posix_spawn", "posix_spawnp", "execv", "execve", "execvp", "execvpe", "execl", "execle",
    "execlp", "execlpe", "spawnv", "spawnve", "spawnl", "subprocess_exec", "subprocess_shell",
}  # fmt: skip
#: Also names of our own methods, so they count only as attributes of `os`.
AMBIGUOUS = {"fork", "system"}


def named_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module imports or looks up as attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            if node.module in {"os", "asyncio"}:
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            is_os = isinstance(node.value, ast.Name) and node.value.id == "os"
            if is_os or node.attr not in AMBIGUOUS:
                yield node.attr


@pytest.mark.parametrize("package", EXPOSED)
def test_the_api_cannot_start_programs_on_the_host(package: str) -> None:
    modules = sorted((SOURCE / package).rglob("*.py"))
    assert modules
    for module in modules:
        found = STARTERS & set(named_in(ast.parse(module.read_text(encoding="utf-8"))))
        assert found == set(), module


@pytest.mark.parametrize(
    "text",
    ["import subprocess", "from os import system", "import os\nos.system('x')", "asyncio.create_subprocess_exec('x')"],
)
def test_calls_that_start_programs_are_detected(text: str) -> None:
    assert STARTERS & set(named_in(ast.parse(text)))


def test_the_embedded_driver_runs_qemu_as_this_user_with_seccomp(tmp_path: Path) -> None:
    own = QemuUser(account=None, why="a test")
    prepare_embedded(f"qemu:///embed?root={tmp_path}", None, own)
    config = (tmp_path / "etc" / "qemu.conf").read_text().splitlines()
    assert "seccomp_sandbox = 1" in config
    assert f'user = "{pwd.getpwuid(os.geteuid()).pw_name}"' in config
    assert f'group = "+{os.getegid()}"' in config


def test_the_embedded_driver_runs_qemu_as_the_chosen_user(tmp_path: Path) -> None:
    account = Account(name="qemu-user", user_id=64055, group_id=107, group_ids=frozenset({107}))
    prepare_embedded(f"qemu:///embed?root={tmp_path}", None, QemuUser(account=account, why="a test"))
    config = (tmp_path / "etc" / "qemu.conf").read_text().splitlines()
    assert "seccomp_sandbox = 1" in config
    assert 'user = "qemu-user"' in config
    assert 'group = "+107"' in config
