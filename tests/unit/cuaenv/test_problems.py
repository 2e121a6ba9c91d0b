"""What users read about wrong input: no phrase of pydantic, and a similar name if there is one."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envd.base.config import load, parse_pool_flags
from envd.base.errors import ConfigError, ImageNotFound
from envd.cli.app import app
from envd.images.catalogue import ImageCatalogue
from envd.tasks.catalogue import TaskCatalogue

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
def test_a_wrong_value_of_an_option_is_described_in_plain_words(
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
