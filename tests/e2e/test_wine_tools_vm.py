"""Tools of an agent on the Wine image, whose agent answers the host's script for Windows: shell and files, over a fork.

Needs `envd image build wine`, and fails without it.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from cuaenv.client import (
    CallTool,
    EditFile,
    EnvClient,
    Episode,
    ListDirectory,
    ReadFile,
    RunShell,
    ToolResult,
    View,
    WriteFile,
)
from cuaenv.v1 import env_pb2, env_pb2_grpc
from tests.support.leftovers import machine_leftovers
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(3600)]

#: An emulated guest on a busy host takes 10 minutes to start Wine.
CONFIG = """\
[pools.wine]
image = "wine"
size = 1
capacity = 2
boot_timeout_s = 1800
allow_guest_access = true
tools = ["shell", "files", "mcp"]

[tasks]
suites = ["builtin:windows"]

[hypervisor]
template_dir = "{template_dir}"
"""
TASK = "windows/notepad-one-word"  # has no setup
HOME = r"C:\users\user"
NO_PIXELS = View(encoding="none")


@pytest.fixture(scope="module")
def address(module_dir: Path, template_dir: Path) -> Iterator[str]:
    state_dir = module_dir / "w"
    with ServedDaemon(state_dir, CONFIG.format(template_dir=template_dir)) as served:
        yield served.wait_for(r"listening on (\S+)")
    assert machine_leftovers(state_dir) == []


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[EnvClient]:
    with EnvClient(address) as client:
        yield client


@pytest.fixture(scope="module")
def episode(client: EnvClient) -> Iterator[Episode]:
    with client.reset(TASK, view=NO_PIXELS, max_steps=100, timeout=timedelta(minutes=40)) as opened:
        assert opened.tools == ("shell", "files")
        yield opened


def run(episode: Episode, command: str, timeout_s: float = 60.0) -> ToolResult:
    step = episode.step(RunShell(command, timedelta(seconds=timeout_s)))
    assert step.errors == ()
    (result,) = step.tool_results
    assert result is not None
    return result


def test_directory_and_variables_stay_and_a_fork_copies_them(client: EnvClient, episode: Episode) -> None:
    made = run(episode, "mkdir Documents\\notes\ncd Documents\\notes\nset NAME=Ann & Bob é")
    assert made.exit_code == 9009 & 255, made  # "Bob" is not a command
    assert run(episode, 'cd\necho %NAME%\nset "NAME=Ann & é"').output == f"{HOME}\\Documents\\notes\nAnn \n"
    with client.fork(episode, count=1) as (copy,):
        assert run(copy, 'cd\nset NAME\nset "NAME=Eve"').output == f"{HOME}\\Documents\\notes\nNAME=Ann & é\n"
        assert run(copy, "echo %NAME%").output == "Eve\n"
    assert run(episode, "set NAME").output == "NAME=Ann & é\n"


def test_a_command_has_its_exit_code_its_limits_and_no_other_effect(episode: Episode) -> None:
    assert run(episode, "cmd /c exit 7").exit_code == 7
    assert run(episode, "exit 3").exit_code == 3
    failed = run(episode, "type absent.txt")
    assert (failed.exit_code, failed.timed_out) == (1, False)
    flood = run(episode, "echo first\nfor /l %i in (1,1,3000) do @echo 0123456789\necho last", 120)
    assert (flood.output[:6], flood.output[-5:]) == ("first\n", "last\n")
    assert f"\n[{flood.left_out_bytes} bytes left out]\n" in flood.output
    assert flood.left_out_bytes == len("first\r\nlast\r\n") + 3000 * len("0123456789\r\n") - 32_768
    endless = run(
        episode, "echo begun\nset NAME=lost\nstart /b cmd /c ping -n 600 127.0.0.1\n:a\nping -n 600 127.0.0.1", 10
    )
    assert (endless.timed_out, endless.exit_code, endless.output[:6]) == (True, None, "begun\n")
    assert run(episode, "echo %NAME%").output == "Ann & é\n"
    marked = episode.run_command(["/bin/sh", "-c", "grep -lz ^ENVD_COMMAND= /proc/[0-9]*/environ"], as_root=True)
    assert marked.stdout == b"", "a process of a command that was ended runs"


def test_files_are_handled_as_the_user(episode: Episode) -> None:
    step = episode.step(
        WriteFile("~\\plan\\a.txt", "one\r\ntwo 日\r\nthree\r\n"),
        EditFile("plan\\a.txt", "two 日\nthree", "2\n3"),
        ReadFile(f"{HOME}\\PLAN\\A.TXT"),
        ReadFile("plan\\a.txt", 2, 1),
        ListDirectory("~\\plan"),
        ReadFile("C:\\windows\\system32\\notepad.exe"),
        ReadFile("absent.txt"),
        WriteFile("C:\\windows\\system32\\notepad.exe", "x"),
    )
    outputs = [result.output if result else None for result in step.tool_results]
    assert outputs[0] == f"[wrote 21 bytes to {HOME}\\plan\\a.txt]"
    assert outputs[2:5] == ["one\r\n2\r\n3\r\n", "2\r\n", "a.txt (11 bytes)"]
    assert (outputs[5] or "").startswith("[binary file, ")
    assert step.errors == (
        f"{HOME}\\absent.txt: No such file or directory",
        "C:\\windows\\system32\\notepad.exe: Permission denied",
    )
    assert episode.step(CallTool("notes", "add")).errors == ("a Windows guest runs no MCP servers",)


def test_a_repeated_request_runs_a_command_once(address: str, episode: Episode) -> None:
    request = env_pb2.StepRequest(
        request_id="count-once",
        episode_id=episode.episode_id,
        step_index=episode.step_count,
        actions=[env_pb2.Action(run_shell=env_pb2.RunShell(command=f"echo x>> {HOME}\\count.txt"))],
    )
    with grpc.insecure_channel(address) as channel:
        stub = env_pb2_grpc.CUAEnvStub(channel)
        calls = [stub.Step.future(request, timeout=300) for _ in range(7)]
        assert len({call.result().action_results[0].SerializeToString() for call in calls}) == 1
    assert episode.read_file(f"{HOME}\\count.txt") == b"x\r\n"
