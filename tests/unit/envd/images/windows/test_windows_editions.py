"""Editions in WIM files made by wimlib."""

from datetime import timedelta
from pathlib import Path

import pytest

from envd.base.errors import ImageError
from envd.images.windows.media import Edition, Release, choose_edition, read_editions
from tests.support.windows_media import MediumEdition, make_wim

SERVER = (
    MediumEdition(
        name="Windows Server 2025 SERVERSTANDARDCORE", edition_id="ServerStandardEval", build=26100,
        installation_type="Server Core",
    ),
    MediumEdition(
        name="Windows Server 2025 SERVERSTANDARD", edition_id="ServerStandardEval", build=26100,
        installation_type="Server",
    ),
)  # fmt: skip


def editions_of(tmp_path: Path, *editions: MediumEdition) -> tuple[Edition, ...]:
    wim = tmp_path / "install.wim"
    make_wim(wim, editions)
    with wim.open("rb") as stream:
        return read_editions(stream)


def test_an_edition_has_its_release_languages_and_evaluation_period(tmp_path: Path) -> None:
    [edition] = editions_of(tmp_path, MediumEdition(languages=("de-DE", "en-US")))
    assert (edition.index, edition.name, edition.architecture) == (1, "Windows 11 Enterprise Evaluation", "x64")
    assert edition.release is Release.WINDOWS_11
    assert (edition.languages, edition.default_language) == (("de-DE", "en-US"), "de-DE")
    assert edition.evaluation == timedelta(days=90)
    assert edition.size_bytes == len("Windows 11 Enterprise Evaluation")


@pytest.mark.parametrize(
    ("build", "installation_type", "release"),
    [
        (19045, "Client", Release.WINDOWS_10),
        (26100, "Client", Release.WINDOWS_11),
        (20348, "Server", Release.SERVER_2022),
        (26100, "Server", Release.SERVER_2025),
    ],
)
def test_a_release_follows_from_build_and_kind(
    tmp_path: Path, build: int, installation_type: str, release: Release
) -> None:
    [edition] = editions_of(tmp_path, MediumEdition(build=build, installation_type=installation_type))
    assert edition.release is release


@pytest.mark.parametrize(("build", "installation_type"), [(17763, "Server"), (9600, "Client")])
def test_an_unsupported_release_is_an_error(tmp_path: Path, build: int, installation_type: str) -> None:
    [edition] = editions_of(tmp_path, MediumEdition(build=build, installation_type=installation_type))
    with pytest.raises(ImageError, match=rf"build {build} is not supported; use an ISO of Windows 10"):
        _ = edition.release


def test_a_server_evaluation_lasts_180_days_and_a_licensed_edition_does_not_expire(tmp_path: Path) -> None:
    server, licensed = editions_of(tmp_path, SERVER[1], MediumEdition(name="Windows 11 Pro", edition_id="Professional"))
    assert server.evaluation == timedelta(days=180)
    assert licensed.evaluation is None


def test_an_edition_is_chosen_by_index_name_or_identifier(tmp_path: Path) -> None:
    editions = editions_of(tmp_path, *SERVER)
    assert choose_edition(editions, "2") is editions[1]
    assert choose_edition(editions, "windows server 2025 serverstandard") is editions[1]
    assert choose_edition(editions[:1], "") is editions[0]
    assert choose_edition(editions[:1], "serverstandardeval") is editions[0]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("", "2 editions; choose one with --edition"),
        ("Pro", "edition 'Pro': not in this ISO; choose one of"),
        ("ServerStandardEval", "several editions match"),
    ],
)
def test_without_exactly_one_match_the_error_lists_the_editions(tmp_path: Path, wanted: str, problem: str) -> None:
    with pytest.raises(ImageError, match=problem) as raised:
        choose_edition(editions_of(tmp_path, *SERVER), wanted)
    assert "2: Windows Server 2025 SERVERSTANDARD (ServerStandardEval)" in str(raised.value)


def test_a_damaged_image_is_an_error(tmp_path: Path) -> None:
    editions_of(tmp_path, MediumEdition())
    whole = (tmp_path / "install.wim").read_bytes()
    cut = tmp_path / "cut.wim"
    for data, problem in ((b"PK" + whole, "not a WIM file"), (whole[:100], "not a WIM"), (whole[:300], "damaged")):
        cut.write_bytes(data)
        with cut.open("rb") as stream, pytest.raises(ImageError, match=problem):
            read_editions(stream)
