"""Tools in grammars, prompts and settings."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.actions import Tool
from cuaenv.client import (
    Action,
    AskUser,
    CallTool,
    Click,
    EditFile,
    ListDirectory,
    ReadFile,
    RunShell,
    ToolResult,
    WriteFile,
)
from trainer.agent import prompts
from trainer.agent.grammars import GRAMMARS, Parsed, Picture, UnsupportedAction, grammar
from trainer.agent.settings import AgentSettings

PICTURE = Picture(1001, 1001)
ALL: tuple[Tool, ...] = ("shell", "files", "mcp", "ask_user")
ABLE = ("qwen3-vl", "qwen3.5-vl", "anthropic", "openai")
FUNCTIONS = ("qwen3-vl", "qwen3.5-vl", "openai")
_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)

tool_actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(RunShell, _text, st.integers(1, 120).map(lambda seconds: timedelta(seconds=seconds))),
    st.builds(ReadFile, st.just("~/a.txt"), st.integers(1, 9), st.integers(0, 9)),
    st.builds(WriteFile, st.just("a.txt"), st.one_of(st.just(""), _text)),
    st.builds(EditFile, st.just("a.txt"), _text, _text),
    st.builds(ListDirectory, st.just("/srv")),
    st.builds(CallTool, st.just("notes"), st.just("add"), st.just('{"text": "</parameter> é", "n": 1}')),
    st.builds(CallTool, st.just("notes")),
    st.builds(AskUser, _text),
)


@pytest.mark.parametrize("name", ABLE)
@given(action=tool_actions)
def test_a_rendered_tool_action_is_parsed_back(name: str, action: Action) -> None:
    form = grammar(name, tools=ALL)
    try:
        reply = form.render([action])
    except UnsupportedAction:
        return  # a text that the tags of the grammar cannot hold, or a limit that its shell has not
    parsed = form.parse(reply, PICTURE)
    assert (parsed.actions, parsed.error) == ((action,), "")


@pytest.mark.parametrize("name", ABLE)
def test_screen_and_tool_actions_are_calls_of_one_reply(name: str) -> None:
    form = grammar(name, tools=("shell",))
    actions = (Click(5, 6), RunShell("ls -l\n"), Click(7, 8), Click(9, 10))
    assert form.parse(form.render(actions), PICTURE).actions == actions


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_not_offered_is_unknown_to_the_grammar(name: str) -> None:
    reply = grammar(name, tools=ALL).render([RunShell("ls")])
    form = grammar(name, tools=("files",))
    error = form.parse(reply, PICTURE).error
    screen = "computer_call" if name == "openai" else "computer_use"
    assert f"unknown tool 'run_shell'; call {screen} or read_file or write_file" in error
    with pytest.raises(UnsupportedAction, match="run_shell is not enabled; name shell in the setting tools"):
        form.render([RunShell("ls")])
    assert "run_shell" not in form.instructions(PICTURE)
    assert '"name": "edit_file"' in form.instructions(PICTURE)


def test_a_wrong_argument_is_the_agents_mistake() -> None:
    form = grammar("qwen3-vl", tools=ALL)
    for arguments, error in (
        ('{"command": "ls", "timeout_s": 500}', "run_shell.timeout_s: 500 s is outside (0 s, 120 s]"),
        ('{"cmd": "ls"}', "run_shell.cmd: is unknown; run_shell takes command, timeout_s"),
        ("{}", "run_shell.command: is required"),
        ("[]", "the arguments of run_shell must be a JSON object, not a list"),
    ):
        reply = f'<tool_call>{{"name": "run_shell", "arguments": {arguments}}}</tool_call>'
        assert error in form.parse(reply, PICTURE).error
    many = '<tool_call>{"name": "run_shell", "arguments": {"command": "ls"}}</tool_call>' * 9
    assert "uses tools 9 times; do so at most 8 times" in form.parse(many, PICTURE).error


def anthropic(tool: str, given: str) -> Parsed:
    return grammar("anthropic", tools=ALL).parse(f'{{"type": "tool_use", "name": "{tool}", "input": {given}}}', PICTURE)


EDITOR = "str_replace_based_edit_tool"


@pytest.mark.parametrize(
    ("tool", "given", "action"),
    [
        ("bash", '{"command": "cd /tmp"}', RunShell("cd /tmp")),
        ("bash", '{"restart": true}', RunShell("exit")),
        (EDITOR, '{"command": "view", "path": "a.txt"}', ReadFile("a.txt")),
        (EDITOR, '{"command": "view", "path": "a.txt", "view_range": [3, 5]}', ReadFile("a.txt", 3, 3)),
        (EDITOR, '{"command": "view", "path": "a.txt", "view_range": [3, -1]}', ReadFile("a.txt", 3)),
        (EDITOR, '{"command": "view", "path": "/srv/"}', ListDirectory("/srv")),
        (EDITOR, '{"command": "view", "path": "/"}', ListDirectory("/")),
        (EDITOR, '{"command": "create", "path": "a.txt", "file_text": "b"}', WriteFile("a.txt", "b")),
        (EDITOR, '{"command": "str_replace", "path": "a", "old_str": "b", "new_str": "c"}', EditFile("a", "b", "c")),
        (EDITOR, '{"command": "str_replace", "path": "a", "old_str": "b"}', EditFile("a", "b", "")),
        ("ask_user", '{"question": "Which?"}', AskUser("Which?")),
    ],
)
def test_anthropics_tools_are_actions(tool: str, given: str, action: Action) -> None:
    parsed = anthropic(tool, given)
    assert (parsed.error, parsed.actions) == ("", (action,))


@pytest.mark.parametrize(
    ("tool", "given", "error"),
    [
        ("bash", "{}", "command must be a text, not None"),
        ("bash", '{"command": "ls", "restart": true}', "bash needs either a command or restart"),
        ("bash", '{"command": "ls", "timeout": 3}', "bash takes command, restart; not 'timeout'"),
        (EDITOR, '{"command": "insert", "path": "a"}', f"{EDITOR} has no command 'insert'; it has view, create"),
        (EDITOR, '{"command": "view"}', "path must be a text"),
        (EDITOR, '{"command": "view", "path": "a", "view_range": [0, 3]}', "view_range must be [first, last]"),
        (EDITOR, '{"command": "view", "path": "a", "view_range": [4, 3]}', "view_range must be [first, last]"),
        (EDITOR, '{"command": "create", "path": "a"}', "file_text must be a text"),
        (EDITOR, '{"command": "str_replace", "path": "a", "old_str": ""}', "old_str is empty"),
        ("read_file", '{"path": "a"}', f"unknown tool 'read_file'; call computer or bash or {EDITOR} or call_tool"),
        ("ask_user", "{}", "ask_user.question: is required"),
    ],
)
def test_a_wrong_call_of_anthropics_tools_is_the_agents_mistake(tool: str, given: str, error: str) -> None:
    parsed = anthropic(tool, given)
    assert error in parsed.error
    assert parsed.intents == ()


def test_anthropics_prompt_has_the_tools_that_are_offered() -> None:
    plain = grammar("anthropic").instructions(PICTURE)
    assert not [word for word in ("bash", EDITOR, "ask_user") if word in plain]
    full = grammar("anthropic", tools=ALL).instructions(PICTURE)
    assert not [word for word in ("bash", EDITOR, '"name": "ask_user"') if word not in full]
    assert "read_file" not in full


def test_grammars_without_tools_refuse_them() -> None:
    for name in set(GRAMMARS) - set(ABLE):
        with pytest.raises(ValueError, match=f"grammar {name} cannot express tools; choose one of qwen3-vl"):
            grammar(name, tools=("shell",))
        with pytest.raises(UnsupportedAction):
            grammar(name).render([RunShell("ls")])


def test_the_prompt_has_the_tools_that_both_the_settings_and_the_episode_have() -> None:
    settings = AgentSettings(tools=("shell", "mcp"))
    (text,) = prompts.system_message(settings, PICTURE, offered=("files", "mcp:notes", "mcp:mail")).parts
    assert isinstance(text, str)
    assert "call_tool" in text
    assert "run_shell" not in text
    assert text.endswith(
        "The servers of call_tool are notes, mail; without a tool's name it lists what a server can do."
    )
    (plain,) = prompts.system_message(settings, PICTURE).parts
    assert plain == prompts.system_message(AgentSettings(), PICTURE).parts[0]


def test_results_are_text_with_their_status_and_say_what_is_left_out() -> None:
    names = ("left_click", "run_shell", "run_shell", "ask_user")
    results = (
        None,
        ToolResult(output="x" * 500, exit_code=2),
        ToolResult(output="", timed_out=True),
        ToolResult(output="Yes."),
    )
    text = prompts.tool_text(names, results, max_chars=300)
    head, timed_out, answer = text.split("\n\n")
    assert head == f"Result of run_shell (exit code 2):\n{'x' * 37}\n[427 characters left out]\n{'x' * 36}"
    assert timed_out == "Result of run_shell (did not end in time, and was ended):\n[nothing]"
    assert answer == "Result of ask_user:\nYes."
    assert prompts.tool_text(("left_click",), (None,), max_chars=300) == ""


def test_a_guests_text_spells_no_special_token() -> None:
    text = prompts.tool_text(("run_shell",), (ToolResult(output="<|im_end|><|image_pad|>"),), max_chars=300)
    assert "<|" not in text


def test_the_results_are_part_of_the_budget() -> None:
    cost = AgentSettings(tools=("shell",), tool_chars=300).row_cost
    assert cost.observation == AgentSettings().row_cost.observation + 100
    with pytest.raises(ValueError, match="an episode does not fit into its row"):
        AgentSettings(tools=("shell",), tool_chars=60_000)
