"""`envd image build windows` up to the point where a machine would start."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envd.cli.image import app
from envd.daemon.state_lock import locked
from envd.images.catalogue import Image, ImageCatalogue
from envd.images.windows.media import open_disc
from envd.images.windows.plan import WindowsOptions, plan_build
from tests.support.windows_media import MediumEdition, make_virtio_iso, make_windows_iso, virtio_files


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("media")
    make_windows_iso(directory / "windows.iso", (MediumEdition(),))
    make_windows_iso(directory / "pro.iso", (MediumEdition(name="Windows 11 Pro", edition_id="Professional"),))
    make_virtio_iso(directory / "virtio-win.iso", virtio_files("w11"))
    return directory


def build(media: Path, cache: Path, *args: str, iso: str = "windows.iso", status: int = 0) -> str:
    command = ["build", "windows", "--iso", str(media / iso), "--virtio-win", str(media / "virtio-win.iso")]
    result = CliRunner().invoke(app, [*command, "--cache-dir", str(cache), *args])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_a_dry_run_writes_the_media_and_the_machine_and_starts_nothing(media: Path, tmp_path: Path) -> None:
    found = json.loads(
        build(media, tmp_path / "cache", "--dry-run", str(tmp_path / "dry"), "--screen", "1366x768", "--json")
    )
    assert found["edition"] == "Windows 11 Enterprise Evaluation"
    domain = Path(found["domain"]).read_text()
    assert '<resolution x="1366" y="768"/>' in domain
    assert found["boot_disc"] in domain
    assert found["answer_disc"] in domain
    assert "HorizontalResolution>1366<" in Path(found["answers"]).read_text()
    with open_disc(Path(found["answer_disc"])) as disc:
        assert disc.find("autounattend.xml")
    assert not (tmp_path / "cache").exists()


def test_each_dry_run_has_another_password(media: Path, tmp_path: Path) -> None:
    found = [
        json.loads(build(media, tmp_path / "cache", "--dry-run", str(tmp_path / name), "--json")) for name in ("a", "b")
    ]
    answers = [Path(each["answers"]).read_text() for each in found]
    assert answers[0] != answers[1]
    assert Path(found[0]["answers"]).stat().st_mode & 0o077 == 0


def test_a_dry_run_needs_a_new_directory_and_an_iso(media: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "not empty; name a new directory" in build(media, tmp_path / "c", "--dry-run", str(tmp_path), status=2)
    result = CliRunner().invoke(app, ["build", "windows", "--cache-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "--iso: missing; name the file, or --download a release" in result.stderr


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--screen", "wide"], "--screen wide: not a size; write WIDTHxHEIGHT"),
        (["--name", "Win 11", "--dry-run", "x"], "--name Win 11: not a name; use lower-case letters"),
        (
            ["--key", "AAAAA-BBBBB-CCCCC-DDDDD-EEEEE"],
            "--key: expected env:NAME, file:PATH or none, never the key itself",
        ),
        (["--key", "env:ENVD_NO_SUCH_KEY"], "--key env:ENVD_NO_SUCH_KEY: cannot be read"),
    ],
)
def test_a_wrong_flag_is_refused(media: Path, tmp_path: Path, flags: list[str], problem: str) -> None:
    message = build(media, tmp_path, *flags, status=2)
    assert problem in message
    assert "AAAAA" not in message


def test_a_key_is_read_from_a_variable_or_file(media: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "AAAAA-BBBBB-CCCCC-DDDDD-EEEEE"
    (tmp_path / "key").write_text(key + "\n")
    monkeypatch.setenv("WINDOWS_KEY", key)
    for number, source in enumerate((f"file:{tmp_path}/key", "env:WINDOWS_KEY")):
        dry = str(tmp_path / f"dry{number}")
        found = json.loads(build(media, tmp_path / "c", "--key", source, "--dry-run", dry, "--json", iso="pro.iso"))
        assert f"<Key>{key}</Key>" in Path(found["answers"]).read_text()


def test_two_builds_do_not_share_a_cache(media: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "cache" / "build"):
        message = build(media, tmp_path / "cache", status=2)
    assert f"process {os.getpid()} builds Windows in it; wait until it ends, or choose another --cache-dir" in message
    assert not (tmp_path / "cache" / "images").exists()


def test_an_image_of_the_same_inputs_is_not_built_again(media: Path, tmp_path: Path) -> None:
    options = WindowsOptions(iso=media / "windows.iso", virtio_win=media / "virtio-win.iso")
    recipe = plan_build(options, directory=tmp_path).digest(lambda *_: None)
    catalogue = ImageCatalogue(tmp_path / "cache")
    for digest in ("1" * 64, "2" * 64):
        with catalogue.staging("win11") as directory:
            image = Image(name="win11", digest=digest, disk="disk", disk_sha256="", source={"recipe": recipe})
            catalogue.publish(directory, image)
    catalogue.make_current(catalogue.get("win11@1"))
    found = json.loads(build(media, tmp_path / "cache", "--json"))
    assert found["source"] == {"recipe": recipe}
    assert catalogue.get("win11").digest == found["digest"]
