"""Hooks of mkdocs: pages link to files of the repository outside of docs/, which become files of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Directory of the site for such files.
_HERE = "repository"
_LINK = re.compile(r"(\]\()((?:\.\./)+)([^)#\s]+)")


def _outside(page_path: str, ups: str, target: str) -> Path | None:
    """Return the file of the repository that a link of a page leads to; None if it stays in docs/."""
    path = (ROOT / "docs" / page_path).parent.joinpath(ups, target).resolve()
    return None if path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT) else path


def _linked(files: Files) -> set[Path]:
    found = set()
    for file in files.documentation_pages():
        for _, ups, target in _LINK.findall(file.content_string):
            path = _outside(file.src_uri, ups, target)
            if path is not None and path.is_file():
                found.add(path)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files."""
    for path in sorted(_linked(files)):
        name = path.relative_to(ROOT)
        files.append(File.generated(config, f"{_HERE}/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links out of docs/ to these files; those to directories become text."""
    source = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        path = _outside(source, match[2], match[3])
        if path is None:
            return match[0]
        up = "../" * source.count("/")
        return f"{match[1]}{up}{_HERE}/{path.relative_to(ROOT)}"

    return _LINK.sub(replaced, markdown)
