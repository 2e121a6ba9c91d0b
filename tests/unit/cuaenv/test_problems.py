"""What users read about wrong input: no phrase of pydantic, and a similar name if there is one."""

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from typer.main import get_command
from typer.testing import CliRunner

from cuaenv.cli.lazy import LazyCommand
from cuaenv.problems import first_problem, problem_of
from envd.base.config_sources import load, parse_pool_flags
from envd.base.errors import ConfigError, ImageNotFound
from envd.cli.app import app
from envd.images.catalogue import ImageCatalogue
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.oracle import parse_action

PYDANTIC = re.compile("Value error|Assertion failed|Input (should|tag)|String should")


def task_file(tmp_path: Path, *, verb: str, checker: str) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(
        "suite: a\ntasks:\n  - name: b\n    instruction: x\n"
        f"    setup: [{{kind: {verb}, path: /x}}]\n    checker: {{kind: {checker}, path: /x}}\n"
    )
    return path


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[pools.p]\nimage = "a=b c"', "'a=b c' is not 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit"),
        ("[pools.p]\nsize = 100000", "pools.p.size: must be at most 4096"),
        ('log_format = "avi"', "log_format: must be 'text' or 'json'"),
    ],
)
def test_a_wrong_setting_is_described_in_plain_words(tmp_path: Path, toml: str, words: str) -> None:
    file = tmp_path / "envd.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load(file=file)
    assert words in str(caught.value)
    assert not PYDANTIC.search(str(caught.value))


def test_a_binary_file_and_a_missing_kind_are_described_in_plain_words(tmp_path: Path) -> None:
    file = tmp_path / "envd.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot be read: not a text in UTF-8 \(byte 0\); check --config"):
        load(file=file)
    kinds: TypeAdapter[_First | _Second] = TypeAdapter(Annotated[_First | _Second, Field(discriminator="kind")])
    with pytest.raises(ValidationError) as caught:
        kinds.validate_python({})
    assert problem_of(caught.value.errors()[0]) == "kind is missing"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checks": []}, "must have at least 1 item, not 0"),
        ({"checks": ["a", "b", "c"]}, "must have at most 2 items, not 3"),
        ({"by_name": {}}, "must have at least 1 item, not 0"),
        ({"first": "x"}, "must be a mapping"),
        ({"first": {"kind": 3}}, "must be 'first'"),
        ({"text": []}, "must be a text"),
        ({"first": None}, "must be a mapping"),
    ],
)
def test_a_wrong_value_is_described_without_the_types_of_python(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Parts.model_validate({"checks": ["a"], "by_name": {"a": 1}, "first": {"kind": "first"}, "text": ""} | changes)
    assert [problem_of(each) for each in caught.value.errors()] == [words]
    with pytest.raises(ValidationError) as caught:
        _Parts.model_validate({})
    assert {problem_of(each) for each in caught.value.errors()} == {"is missing"}


def test_the_first_problem_has_its_place_or_the_name_of_the_whole() -> None:
    with pytest.raises(ValidationError) as caught:
        _Parts.model_validate({"checks": ["a", 2], "by_name": {"a": 1}, "first": {}, "text": ""})
    assert first_problem(caught.value.errors(), whole="file") == 'checks.1: must be a text; write "2"'
    with pytest.raises(ValidationError) as caught:
        _Parts.model_validate_json("[]")
    assert first_problem(caught.value.errors()) == "must be an object"
    assert first_problem(caught.value.errors(), whole="file") == "file: must be an object"


class _First(BaseModel):
    kind: Literal["first"]


class _Second(BaseModel):
    kind: Literal["second"]


class _Parts(BaseModel):
    checks: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]
    by_name: Annotated[dict[str, int], Field(min_length=1)]
    first: _First
    text: str


@pytest.mark.parametrize(
    ("verb", "checker", "words"),
    [
        ("lauch", "file_absent", "setup[0]: unknown kind 'lauch'; did you mean launch?"),
        ("launch", "file_txt", "checker: unknown kind 'file_txt'; did you mean file_text?"),
        ("launch", "zzz", "checker: unknown kind 'zzz'; use one of "),
    ],
)
def test_an_unknown_kind_in_a_task_file_has_a_suggestion(tmp_path: Path, verb: str, checker: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TaskCatalogue.load([task_file(tmp_path, verb=verb, checker=checker)], include_builtin=False)
    assert words in str(caught.value)
    assert not PYDANTIC.search(str(caught.value))


@pytest.mark.parametrize(
    ("words", "message"),
    [(["top", "--sort", "foo"], "'foo' is not one of 'age'"), (["top", "--interval", "0"], "must be at least 0.2")],
)
def test_a_wrong_option_is_described_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in result.output
    assert not PYDANTIC.search(result.output)


@pytest.mark.parametrize("spec", ["0", "desktop=0", "100000"])
def test_a_pool_has_1_to_4096_machines(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"^--pool {spec}: must have at least 1 and at most 4096 machines"):
        parse_pool_flags([spec])


@pytest.mark.parametrize(
    ("name", "words"),
    [("dekstop", "; did you mean desktop?"), ("foo", "; create it with `envd image build` or `envd image import`")],
)
def test_an_unknown_image_has_a_suggestion_or_a_remedy(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ImageNotFound) as caught:
        ImageCatalogue(tmp_path).get(name)
    assert str(caught.value).endswith(words)


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    for read in (lambda path: load(file=path), lambda path: TaskCatalogue.load([path], include_builtin=False)):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path / "none")
        assert str(caught.value).count(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("suite: mine\n  tasks: []\n", "cannot be read: line 2: mapping values are not allowed"),
        ("suite: mine\nsuite: yours\n", "cannot be read: line 2: duplicate key 'suite'"),
    ],
)
def test_a_malformed_task_file_is_one_line_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        TaskCatalogue.load([tmp_path / "mine.yaml"], include_builtin=False)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_space_or_quote_in_yaml_is_named() -> None:
    with pytest.raises(ValueError, match=r"click\.x:819: is unknown; a colon needs a space"):
        parse_action({"click": {"x:819": None, "y": 1}})
    assert problem_of({"type": "string_type", "input": 2, "msg": ""}) == 'must be a text; write "2"'
    assert problem_of({"type": "string_type", "input": True, "msg": ""}) == 'must be a text; write "true"'


def option_names(*words: str) -> set[str]:
    command = get_command(app)
    for word in words:
        command = getattr(command, "commands", {})[word]
        command = command.load() if isinstance(command, LazyCommand) else command
    return {name for parameter in command.params for name in parameter.opts}


def test_commands_with_drawn_desktops_alone_accept_no_accelerator() -> None:
    assert {"--hypervisor", "--accelerator"} <= option_names("bench", "step")
    for words in (("quickstart",), ("bench", "scale")):
        assert option_names(*words) & {"--hypervisor", "--accelerator"} == {"--hypervisor"}


def test_the_help_of_a_setting_has_its_default() -> None:
    said = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert "[default: (127.0.0.1:50051)]" in said
    assert "[default: (info)]" in said


def test_files_are_copied_into_a_new_directory_only(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["deploy", "copy", str(tmp_path)], env={"COLUMNS": "200"})
    assert (result.exit_code, result.stderr) == (2, f"error: {tmp_path}: File exists; choose a new directory\n")
