"""Tools of an agent, from the client to a drawn desktop: results, refusals, exactly once, forks, the task's user."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.actions import MAX_TOOL_COUNT, Action
from cuaenv.client import (
    AskUser,
    AsyncEnvClient,
    AsyncEpisode,
    BadRequest,
    CallTool,
    Done,
    EditFile,
    ListDirectory,
    ReadFile,
    RunShell,
    StepResult,
    ToolResult,
    WriteFile,
)
from cuaenv.v1 import env_pb2
from envd.base.config import CheckpointsConfig
from envd.base.errors import MachineLost
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.recording.recorder import Recorder
from envd.episodes.recording.records import Kind, read_records
from envd.episodes.recording.writer import RecordingDirectory
from envd.episodes.types import ResetCommand, StepCommand
from envd.tasks.model import Task
from tests.support.clock import until
from tests.support.faulty import FakeHost
from tests.support.mcp_client import client_of
from tests.support.scripted_replies import ScriptedReplies
from tests.support.server import FakeServer, load_fake_tasks, serve_fake, served_client
from trainer.adapters.session import SessionSettings
from trainer.agent.attempts import play_task
from trainer.agent.grammars import grammar
from trainer.agent.settings import AgentSettings

_USER = {
    "facts": [{"about": "date|when", "answer": "On 14 March."}, {"about": "room", "answer": "In room 7."}],
    "in_order": True,
    "max_questions": 4,
}


def _task(name: str, **keys: Any) -> Task:
    blank = load_fake_tasks().get("fake/count-to-five").model_dump(exclude_unset=True, exclude={"oracle"})
    return Task.model_validate({**blank, "task_id": f"fake/{name}", **keys})


_TASKS = (
    _task("with-tools", tools=("shell", "files")),
    _task("with-user", tools=("ask_user",), user=_USER),
    _task("without-tools"),
)


@asynccontextmanager
async def _served(task: str, **options: Any) -> AsyncIterator[tuple[FakeServer, AsyncEnvClient, AsyncEpisode]]:
    async with (
        served_client(extra_tasks=_TASKS, **options) as (server, client),
        client.reset(f"fake/{task}") as episode,
    ):
        yield server, client, episode


def _only(step: StepResult) -> ToolResult:
    (result,) = step.tool_results
    assert step.errors == ()
    assert result is not None
    return result


async def test_a_shell_keeps_its_directory_and_variables_and_a_fork_copies_them() -> None:
    async with _served("with-tools") as (_, client, episode):
        assert episode.tools == ("shell", "files")
        made = await episode.step(RunShell("mkdir notes && cd notes; NAME=Ann"))
        assert _only(made) == ToolResult(output="", exit_code=0)
        assert _only(await episode.step(RunShell("pwd; echo $NAME"))).output == "/home/user/notes\nAnn\n"
        async with client.fork(episode, count=1) as (copy,):
            assert copy.tools == ("shell", "files")
            await copy.step(RunShell("NAME=Bob"))
            assert _only(await copy.step(RunShell("pwd; echo $NAME"))).output == "/home/user/notes\nBob\n"
        assert _only(await episode.step(RunShell("echo $NAME"))).output == "Ann\n"


async def test_a_failed_command_has_its_exit_code_and_one_that_does_not_end_is_timed_out() -> None:
    async with _served("with-tools") as (_, _, episode):
        failed = _only(await episode.step(RunShell("cat missing.txt")))
        assert (failed.exit_code, failed.output) == (1, "cat: /home/user/missing.txt: No such file or directory\n")
        endless = _only(await episode.step(RunShell("sleep 1000", timeout=timedelta(seconds=0.1))))
        assert (endless.timed_out, endless.exit_code) == (True, None)


async def test_files_are_written_edited_read_and_listed() -> None:
    async with _served("with-tools") as (_, _, episode):
        step = await episode.step(
            WriteFile("~/a.txt", "one\ntwo\nthree\n"),
            EditFile("~/a.txt", "two", "2"),
            ReadFile("/home/user/a.txt"),
            ReadFile("a.txt", first_line=2, line_count=1),
            ListDirectory("~"),
            EditFile("a.txt", "absent", "x"),
        )
        outputs = [result and result.output for result in step.tool_results]
        assert outputs[2:5] == ["one\n2\nthree\n", "2\n", "a.txt (12 bytes)\nclicks.txt (2 bytes)"]
        assert outputs[5] is None
        assert step.errors == ("the old text occurs 0 times in /home/user/a.txt",)


async def test_a_result_that_is_cut_says_how_much_is_left_out() -> None:
    async with _served("with-tools") as (_, _, episode):
        step = await episode.step(WriteFile("big.txt", "é" * 100_000), RunShell("cat big.txt"))
        result = step.tool_results[1]
        assert result is not None
        assert result.left_out_bytes == 200_000 - 32_768
        assert "\n[167232 bytes left out]\n" in result.output


async def test_a_tool_that_is_not_allowed_is_the_agents_mistake_and_has_no_effect() -> None:
    async with _served("without-tools") as (server, client, episode):
        step = await episode.step(WriteFile("a.txt", "x"), RunShell("cat a.txt"))
        assert step.errors == (
            "files is not allowed in this episode; allowed tools: none",
            "shell is not allowed in this episode; allowed tools: none",
        )
        assert step.tool_results == (None, None)
        server.pool.settings = server.pool.settings.model_copy(update={"tools": ("shell",)})
        async with client.reset("fake/without-tools") as other:
            assert other.tools == ("shell",)
            assert _only(await other.step(RunShell("echo hi"))).output == "hi\n"
            assert "files is not allowed" in (await other.step(ReadFile("a.txt"))).errors[0]
        (pool,) = await client.list_pools()
        assert pool.tools == ("shell",)
        tasks = await client.list_tasks()
        assert next(task for task in tasks if task.task_id == "fake/with-tools").tools == ("shell", "files")


async def test_the_user_says_facts_in_their_order_and_answers_a_limited_number_of_questions() -> None:
    async with _served("with-user") as (_, client, episode):
        assert episode.tools == ("ask_user",)
        assert _only(await episode.step(AskUser("Which room?"))).output == "Let us talk about something else first."
        assert _only(await episode.step(AskUser("When is it, and in which ROOM?"))).output == "On 14 March. In room 7."
        async with client.fork(episode, count=1) as (copy,):
            assert _only(await copy.step(AskUser("The room again?"))).output == "In room 7."
        assert _only(await episode.step(AskUser("And the room?"))).output == "In room 7."
        assert _only(await episode.step(AskUser("How old are you?"))).output == "I do not know."
        assert (await episode.step(AskUser("When?"))).errors == ("the user answers no more than 4 questions",)


async def test_a_checkpoint_keeps_the_shell_and_what_the_user_said(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, settings=CheckpointsConfig(), reserve_bytes=0)
    async with _served("with-user", checkpoints=store) as (server, client, episode):
        server.pool.settings = server.pool.settings.model_copy(update={"tools": ("shell",)})
        await episode.step(AskUser("When?"))
        async with client.reset(await episode.checkpoint()) as copy:
            assert copy.tools == ("ask_user", "shell")
            assert _only(await copy.step(AskUser("Which room?"))).output == "In room 7."
    async with _served("with-tools", checkpoints=store) as (_, client, episode):
        await episode.step(RunShell("mkdir a && cd a; X=5"))
        async with client.reset(await episode.checkpoint()) as copy:
            assert _only(await copy.step(RunShell("pwd; echo $X"))).output == "/home/user/a\n5\n"


async def test_a_task_without_mcp_servers_has_none_to_call() -> None:
    async with _served("with-tools") as (server, client, _):
        server.pool.settings = server.pool.settings.model_copy(update={"tools": ("mcp", "ask_user")})
        async with client.reset("fake/without-tools") as episode:
            assert episode.tools == ()
            step = await episode.step(CallTool("notes", "add"), AskUser("Who?"))
            assert step.errors == ("a drawn desktop runs no MCP servers", "this task has no user to ask")


async def test_a_step_with_too_many_tool_actions_is_refused() -> None:
    async with _served("with-tools") as (_, _, episode):
        with pytest.raises(BadRequest, match="has 9 actions of tools; give at most 8"):
            await episode.step(*[RunShell("true")] * (MAX_TOOL_COUNT + 1))


async def test_repeated_requests_run_a_command_once_and_return_the_same_result() -> None:
    async with _served("with-tools") as (_, _, episode):
        for index in range(17):
            request = env_pb2.StepRequest(
                request_id=f"step-{index}",
                episode_id=episode.episode_id,
                step_index=index,
                actions=[env_pb2.Action(run_shell=env_pb2.RunShell(command="echo x >> count.txt; cat count.txt"))],
            )
            copies = [episode._call("Step", request, timedelta(seconds=30)) for _ in range(7)]
            responses = await asyncio.gather(*copies)
            assert {response.action_results[0].output for response in responses} == {"x\n" * (index + 1)}
            episode._note(responses[0].episode)


def _step(episode_id: str, index: int, *actions: Action) -> StepCommand:
    observe = ObservationOptions(encoding=Encoding.NONE)
    return StepCommand(
        request_id=f"step-{index}", episode_id=episode_id, step_index=index, actions=actions, observe=observe
    )


async def _open(server: FakeServer, task: str) -> str:
    observe = ObservationOptions(encoding=Encoding.NONE)
    reset = await server.service.reset(ResetCommand(request_id="reset", task_id=f"fake/{task}", observe=observe))
    return reset.episodes[0].episode_id


async def test_a_restarted_daemon_replays_results_and_remembers_what_the_user_said(tmp_path: Path) -> None:
    options: dict[str, Any] = {"database": tmp_path / "envd.db", "host": FakeHost(), "extra_tasks": _TASKS}
    async with serve_fake(**options) as server:
        episode_id = await _open(server, "with-user")
        asked = await server.service.step(_step(episode_id, 0, AskUser("when?")))
        await server.kill()
    async with serve_fake(**options) as server:
        again = await server.service.step(_step(episode_id, 0, AskUser("when?")))
        assert again.replayed
        assert again.outcomes == asked.outcomes
        assert asked.outcomes[0].output == "On 14 March."
        assert (await server.service.step(_step(episode_id, 1, AskUser("room?")))).outcomes[0].output == "In room 7."


async def test_a_command_during_which_the_daemon_is_killed_is_never_run_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"database": tmp_path / "envd.db", "host": FakeHost(), "extra_tasks": _TASKS}
    command = RunShell("echo x >> count.txt; sleep 20")
    async with serve_fake(**options) as server:
        episode_id = await _open(server, "with-tools")
        episode = server.service._registry.get(episode_id)
        files = options["host"].machines[episode.machine.machine_id].files
        running = asyncio.create_task(server.service.step(_step(episode_id, 0, command)))
        await until(lambda: "/home/user/count.txt" in files)
        await server.kill()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with serve_fake(**options) as server:
        with pytest.raises(MachineLost, match="the daemon restarted during step step-0"):
            await server.service.step(_step(episode_id, 0, command))
        assert files["/home/user/count.txt"] == b"x\n"


async def test_a_recording_has_the_results(tmp_path: Path) -> None:
    async with serve_fake(extra_tasks=_TASKS) as server:
        directory = RecordingDirectory(tmp_path, limit_bytes=1 << 30, min_free_bytes=0)
        recorder = Recorder(server.service, directory, max_rate_hz=1, on_failed=lambda _: None)
        episode_id = await _open(server, "with-tools")
        await server.service.step(_step(episode_id, 0, RunShell("echo hi"), RunShell("false"), Done()))
        await server.service.close(episode_id)
        await recorder.aclose()
        with (tmp_path / f"{episode_id}.rec").open("rb") as file:
            (step,) = [record.json() for record in read_records(file, name="r") if record.kind is Kind.STEP]
    assert step["actions"] == ["run 'echo hi': 'hi\\n'", "run 'false': '' (exit code 1)", "done"]
    assert step["outputs"] == ["hi\n", "", None]


@pytest.mark.parametrize(("name", "tool"), [("qwen3-vl", "run_shell"), ("anthropic", "bash"), ("openai", "run_shell")])
async def test_the_model_reads_the_result_in_its_next_turn(name: str, tool: str) -> None:
    form = grammar(name, tools=("shell",))
    model = ScriptedReplies([form.render([RunShell("echo 42; cat nothing")]), form.render([Done()])])
    settings = AgentSettings(grammar=name, max_turns=3, tools=("shell", "ask_user"))
    async with served_client(extra_tasks=_TASKS, size=1) as (_, client):
        trajectory = await play_task(client, "fake/with-tools", lambda: model, settings=settings)
    assert trajectory.error is None
    (row,) = model.rows
    system, _, reply, result = row[:4]
    assert tool in str(system.parts)
    assert "ask_user" not in str(system.parts)
    assert reply.role == "assistant"
    assert result.role == "user"
    assert f"Result of {tool} (exit code 1):\n42\ncat: /home/user/nothing: No such file" in str(result.parts[-1])


async def test_an_mcp_client_reads_the_results_of_tools() -> None:
    async with serve_fake(extra_tasks=_TASKS, size=1) as server:
        settings = SessionSettings.connect(server.address)
        async with client_of(settings, task="fake/with-tools") as client:
            opened = await client.call_tool("reset", {})
            session = str(opened.content[0]).partition("session: ")[2].partition("\\n")[0].partition("'")[0]
            actions = [{"action": "run_shell", "command": "echo 42"}, {"action": "read_file", "path": "absent"}]
            stepped = await client.call_tool("step", {"session": session, "actions": actions})
            text = str(stepped.content[0])
            await client.call_tool("close", {"session": session})
    assert "action 0: 42" in text
    assert "action 1: /home/user/absent: No such file or directory" in text
