"""What stands between an OSWorld task and a run on this host. Pure: looks at tasks and at what is said to be there."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from envd.hypervisor.machine import GuestOs
from envd.osworld.files import OsworldFile
from envd.osworld.workers import KnownNames
from envd.tasks.osworld import asset_urls, measured


class Obstacle(Enum):
    """Kinds of reasons why a task cannot run."""

    UNKNOWN_FUNCTION = "unknown function"
    """The installed package has no such setup verb, getter or metric: it lags behind the task files."""
    CREDENTIALS = "credentials"
    """It signs in to an account."""
    INTERNET = "internet"
    """Setup, agent or evaluator need live web pages; guests have no network."""
    PORT = "guest port"
    """It is set up or scored over a port of the guest's that is not forwarded: the browser's or the player's."""
    ASSETS = "assets"
    """Files that are downloaded ahead of time are not in the cache."""
    APPLICATION = "application"
    """The image has not the program that it is about."""
    IMAGE = "image"
    """There is no image of its operating system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason."""

    obstacle: Obstacle
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What this host has for OSWorld's tasks."""

    known: KnownNames | None
    """What the installed package knows; None where none is installed."""
    has_asset: Callable[[str], bool]
    """Whether a URL's file is in the cache."""
    packages: Mapping[GuestOs, Collection[str] | None]
    """Packages in the image of each system: None where they are not told, no key where there is no image."""


_CREDENTIALS_VERBS = frozenset({"googledrive", "login"})
_CREDENTIALS_GETTERS = frozenset({"googledrive_file"})
_INSTALLS = re.compile(r"\b(pip3? install|apt(-get)? install|wget|curl)\b")
_PORT_VERBS = frozenset({"chrome_open_tabs", "chrome_close_tabs"})
_INTERNET_GETTERS = frozenset(
    {"info_from_website", "pdf_from_url", "gotoRecreationPage_and_get_html_content", "page_info"}
)
#: Getters that ask the browser (Chrome's debugging protocol) or the player (VLC's HTTP interface) over their own ports.
_PORT_GETTERS = frozenset(
    {
        "active_tab_html_parse", "active_tab_info", "active_tab_url_parse", "chrome_appearance_mode_ui", "cookie_data",
        "gotoRecreationPage_and_get_html_content", "number_of_search_results", "open_tabs_info", "page_info",
        "pdf_from_url", "url_dashPart", "url_path_parse", "vlc_playing_info",
    }
)  # fmt: skip

#: Programs that commands of tasks name, and the packages of which one has them.
_PROGRAMS = {
    "chromium": ("chromium",),
    "code": ("code",),
    "gimp": ("gimp",),
    "gio": ("libglib2.0-bin",),
    "google-chrome": ("chromium", "google-chrome-stable"),
    "libreoffice": ("libreoffice-impress", "libreoffice-calc", "libreoffice-writer"),
    "nautilus": ("nautilus",),
    "pactl": ("pulseaudio-utils",),
    "soffice": ("libreoffice-impress", "libreoffice-calc", "libreoffice-writer"),
    "thunderbird": ("thunderbird",),
    "unzip": ("unzip",),
    "vlc": ("vlc-bin",),
}
#: The same for the domains, whose tasks need their application even if no command names it.
_DOMAINS = {
    "chrome": ("chromium", "google-chrome-stable"),
    "gimp": ("gimp",),
    "libreoffice_calc": ("libreoffice-calc",),
    "libreoffice_impress": ("libreoffice-impress",),
    "libreoffice_writer": ("libreoffice-writer",),
    "thunderbird": ("thunderbird",),
    "vlc": ("vlc-bin",),
    "vs_code": ("code",),
}
_APPLICATIONS = {
    "calc": "libreoffice_calc", "libreoffice": "libreoffice_calc", "libreoffice calc": "libreoffice_calc",
    "vscode": "vs_code", "writer": "libreoffice_writer", "browser": "chrome",
}  # fmt: skip


def findings(file: OsworldFile, host: Host) -> tuple[Finding, ...]:
    """Return all that keeps a task from running here, each thing once; nothing where it can run."""
    found = (Finding(obstacle=obstacle, what=what) for obstacle, what in _look(file, host))
    return tuple(dict.fromkeys(found))


def _look(file: OsworldFile, host: Host) -> Iterator[tuple[Obstacle, str]]:
    verbs = [str(step["type"]) for step in (*file.setup, *(file.evaluator.get("postconfig") or ()))]
    getters = [
        str(part["type"]) for key in ("result", "expected") for part in measured(file.evaluator, key) if "type" in part
    ]
    func = file.evaluator["func"]
    metrics = [] if file.is_infeasible else [func] if isinstance(func, str) else list(func)
    if host.known is not None:
        for kind, names, known in (
            ("setup verb", verbs, host.known.verbs),
            ("getter", getters, host.known.getters),
            ("metric", metrics, host.known.metrics),
        ):
            yield from ((Obstacle.UNKNOWN_FUNCTION, f"{kind} {name}") for name in names if name not in known)
    for name in (*(set(verbs) & _CREDENTIALS_VERBS), *(set(getters) & _CREDENTIALS_GETTERS)):
        yield Obstacle.CREDENTIALS, name
    if file.content.get("proxy"):
        yield Obstacle.INTERNET, "its pages are on the live web"
    yield from ((Obstacle.INTERNET, name) for name in getters if name in _INTERNET_GETTERS)
    # Nobody can do an infeasible task, with a network or without.
    if not file.is_infeasible and re.search(r"https?://|\binstall\b", file.content["instruction"], re.IGNORECASE):
        yield Obstacle.INTERNET, "its instruction says to download or to install"
    for step in file.setup:
        if step["type"] == "chrome_open_tabs" and any(map(_is_web, step["parameters"].get("urls_to_open", ()))):
            yield Obstacle.INTERNET, "it opens web pages"
        if step["type"] in ("execute", "command") and re.search(
            r"\b(pip3? install|apt(-get)? install|wget|curl)\b", _command(step)
        ):
            yield Obstacle.INTERNET, "its setup installs or downloads"
    for name in (*(set(verbs) & _PORT_VERBS), *(set(getters) & _PORT_GETTERS)):
        yield Obstacle.PORT, name
    missing = [url for url in asset_urls(file.setup, file.evaluator).values() if not host.has_asset(url)]
    if missing:
        yield Obstacle.ASSETS, f"{len(missing)} files are not fetched, such as {missing[0]}"
    yield from _missing_programs(file, host)


def _missing_programs(file: OsworldFile, host: Host) -> Iterator[tuple[Obstacle, str]]:
    if file.os not in host.packages:
        yield Obstacle.IMAGE, f"no image runs {file.os.value}"
        return
    packages = host.packages[file.os]
    if packages is None:
        return
    named = {_APPLICATIONS.get(app.lower(), app.lower()) for app in file.content.get("related_apps") or ()}
    wanted = {name: _DOMAINS[name] for name in {file.domain, *named} if name in _DOMAINS}
    steps = (*file.setup, *(file.evaluator.get("postconfig") or ()), *measured(file.evaluator, "result"))
    said = " ".join(map(_command, steps))
    wanted |= {name: having for name, having in _PROGRAMS.items() if re.search(rf"(?<![\w./-]){name}(?![\w.-])", said)}
    for name, having in sorted(wanted.items()):
        if not any(package in packages for package in having):
            yield Obstacle.APPLICATION, f"{name} (package {' or '.join(having)})"


def _command(step: Mapping[str, Any]) -> str:
    """Return the command that a step or a getter runs in the guest, as one text; empty for none."""
    command = (step.get("parameters") or step).get("command", "")
    return command if isinstance(command, str) else " ".join(map(str, command))


def _is_web(url: object) -> bool:
    text = str(url)
    return text.startswith(("http://", "https://")) and not re.match(r"https?://(localhost|127\.)", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many tasks of a domain can run, and what keeps the others from it."""

    suite: str
    domain: str
    total: int
    runnable: int
    fetchable: int
    """That would run once their files were fetched."""
    obstacles: Mapping[Obstacle, int]
    """Tasks that each kind of reason holds up, whatever else does."""


def cover(files: Sequence[OsworldFile], found: Mapping[str, Sequence[Finding]]) -> list[Coverage]:
    """Return a row for each domain.

    Args:
        files: All tasks.
        found: What `findings` says, by task id.
    """
    rows: list[Coverage] = []
    for suite, domain in sorted({(file.suite, file.domain) for file in files}):
        ids = [file.task_id for file in files if (file.suite, file.domain) == (suite, domain)]
        kinds = [{finding.obstacle for finding in found[task_id]} for task_id in ids]
        rows.append(
            Coverage(
                suite=suite,
                domain=domain,
                total=len(ids),
                runnable=sum(not each for each in kinds),
                fetchable=sum(each == {Obstacle.ASSETS} for each in kinds),
                obstacles={obstacle: sum(obstacle in each for each in kinds) for obstacle in Obstacle},
            )
        )
    return rows
