"""Distributions of the same name are refused before they are mistaken for ours."""

from pathlib import Path

import pytest

from cuaenv.cli.clash import refuse_clash


def test_another_distribution_of_the_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_clash("envd")
    (tmp_path / "envd-1.3.6.dist-info").mkdir()
    (tmp_path / "envd-1.3.6.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: envd\nVersion: 1.3.6\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match=r"envd: the distribution envd 1\.3\.6 is installed"):
        refuse_clash("envd")
