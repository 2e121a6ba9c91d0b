"""Hooks of mkdocs: insert generated text; make files outside of docs/ that pages link to files of the site."""

import os
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_complete = runpy.run_path(str(DOCS / "generate.py"))["complete"]
#: Directory of the site for such files.
_HERE = "repository"
#: `[text](path#anchor)`, without links to other sites and within a page.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!#|https?:)([^)#\s]+)(#[^)\s]*)?\)")


def _source(page_path: str) -> Path:
    """Return the file that a page is made of."""
    outside = page_path.removeprefix(f"{_HERE}/")
    return ROOT / outside if outside != page_path else DOCS / page_path


def _target(page_path: str, link: str) -> Path:
    return (_source(page_path).parent / link).resolve()


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that pages link to, and those that they link to."""
    added: set[Path] = set()
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while pages:
        page_path, text = pages.pop()
        for _, _, link, _ in _LINK.findall(text):
            path = _target(page_path, link)
            if path in added or not path.is_file() or path.is_relative_to(DOCS) or not path.is_relative_to(ROOT):
                continue
            added.add(path)
            name = f"{_HERE}/{path.relative_to(ROOT)}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
            if path.suffix == ".md":
                pages.append((name, path.read_text(encoding="utf-8")))
    files.append(File.generated(config, "llms.txt", content=_llms(files, config)))
    return files


def _llms(files: Files, config: Any) -> str:
    """Return the start page as https://llmstxt.org describes: a summary and the pages by section."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for line in (DOCS / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        for text, link in re.findall(r"\[([^\]]+)\]\(([^)#\s]+)\)", line) if line.startswith("|") else ():
            path = _target("README.md", link)
            inside = path.is_relative_to(DOCS)
            page = files.get_file_from_path(
                str(path.relative_to(DOCS)) if inside else f"{_HERE}/{path.relative_to(ROOT)}"
            )
            if page is not None:
                lines.append(f"- [{text}]({page.url}): {line.split('|')[2].strip()}")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Insert generated text, and lead links to their targets on the site.

    Links to directories and excluded files become text.
    """
    source = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        mark, text, link, anchor = match.groups(default="")
        path = _target(source, link)
        if not path.is_relative_to(ROOT):
            return match[0]
        inside = path.is_relative_to(DOCS)
        place = str(path.relative_to(DOCS)) if inside else f"{_HERE}/{path.relative_to(ROOT)}"
        if path.exists() and (path.is_dir() or files.get_file_from_path(place) is None):
            return text
        return f"{mark}[{text}]({os.path.relpath(place, Path(source).parent)}{anchor})"

    return _LINK.sub(replaced, _complete(markdown))
