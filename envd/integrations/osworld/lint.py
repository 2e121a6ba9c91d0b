"""Find the reasons why OSWorld tasks cannot run on this host. Pure: takes the tasks and a description of the host."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files as resources
from typing import Any

import yaml

from envd.hypervisor.machine import GuestOs
from envd.integrations.osworld.downloads import asset_urls, getter_configs
from envd.integrations.osworld.files import OsworldFile
from envd.integrations.osworld.workers import KnownNames


class Obstacle(Enum):
    """Kinds of reasons why a task cannot run."""

    UNKNOWN_FUNCTION = "unknown function"
    """The installed package lacks a setup verb, getter or metric: it is older than the task files."""
    CREDENTIALS = "credentials"
    """The task signs in to an account."""
    INTERNET = "internet"
    """Setup or agent download or install something; guests have no network."""
    RECORDING = "web recording"
    """Setup, agent or evaluator need web pages, which no pool of the image lets through or replays."""
    PORT = "guest port"
    """The task is set up or scored over a guest port that is not forwarded: the browser's or the player's."""
    ASSETS = "assets"
    """Files that must be fetched ahead of time are not in the cache."""
    APPLICATION = "application"
    """The image lacks a program."""
    IMAGE = "image"
    """No image has its operating system."""
    MALFORMED = "malformed"
    """A part of the task's file is not of the form that OSWorld's have."""


#: One reason, with its detail.
FoundObstacle = tuple[Obstacle, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSupplies:
    """What this host provides for OSWorld's tasks."""

    known: KnownNames | None
    """Names in the installed package; None if it is not installed."""
    has_asset: Callable[[str], bool]
    """Whether a URL's file is in the cache."""
    packages: Mapping[GuestOs, Collection[str] | None]
    """Packages in the image of each system: None if unknown, no key without an image."""
    has_web: bool = False
    """Whether guests see web pages, live or recorded."""


_NEEDS: Mapping[str, Any] = yaml.safe_load((resources("envd.integrations.osworld") / "needs.yaml").read_text("utf-8"))
_CREDENTIALS_VERBS, _CREDENTIALS_GETTERS, _WINDOWS_PORT_VERBS, _WEB_GETTERS, _PORT_GETTERS = (
    frozenset[str](_NEEDS[name])
    for name in ("credentials_verbs", "credentials_getters", "windows_port_verbs", "web_getters", "port_getters")
)
_PROGRAMS: Mapping[str, Sequence[str]] = _NEEDS["programs"]
_DOMAINS: Mapping[str, Sequence[str]] = _NEEDS["domains"]
_APPLICATIONS: Mapping[str, str] = _NEEDS["applications"]
_DOWNLOADS = re.compile(r"\b(pip3? install|apt(-get)? install|wget|curl)\b")
_WEB_PAGE = re.compile(r"https?://(?!localhost|127\.)")


def findings(file: OsworldFile, host: HostSupplies) -> tuple[FoundObstacle, ...]:
    """Return the reasons why a task cannot run here, without duplicates; empty if it can."""
    try:
        found = list(_find(file, host))
    except (AttributeError, KeyError, TypeError) as error:
        found = [(Obstacle.MALFORMED, repr(error))]
    return tuple(dict.fromkeys([*found, *missing_files(file, host.has_asset)]))


def missing_files(file: OsworldFile, has_asset: Callable[[str], bool]) -> tuple[FoundObstacle, ...]:
    """Return the finding that files of a task are not in the cache; empty if they are."""
    missing = [url for url in asset_urls(file.setup, file.evaluator).values() if not has_asset(url)]
    detail = f"{len(missing)} files are not fetched, such as {missing[0]}" if missing else ""
    return ((Obstacle.ASSETS, detail),) if missing else ()


def texts_of(found: Sequence[FoundObstacle]) -> tuple[str, ...]:
    """Return reasons as texts, each `kind: detail`."""
    return tuple(f"{obstacle.value}: {detail}" for obstacle, detail in found)


def _find(file: OsworldFile, host: HostSupplies) -> Iterator[FoundObstacle]:
    verbs = [str(step["type"]) for step in (*file.setup, *(file.evaluator.get("postconfig") or ()))]
    getters = [
        str(part["type"])
        for key in ("result", "expected")
        for part in getter_configs(file.evaluator, key)
        if "type" in part
    ]
    func = file.evaluator["func"]
    metrics = [] if file.is_infeasible else [func] if isinstance(func, str) else list(func)
    if host.known is not None:
        for kind, names, known in (
            ("setup verb", verbs, host.known["verbs"]),
            ("getter", getters, host.known["getters"]),
            ("metric", metrics, host.known["metrics"]),
        ):
            yield from ((Obstacle.UNKNOWN_FUNCTION, f"{kind} {name}") for name in names if name not in known)
    for name in (*(set(verbs) & _CREDENTIALS_VERBS), *(set(getters) & _CREDENTIALS_GETTERS)):
        yield Obstacle.CREDENTIALS, name
    if not host.has_web:
        yield from _web_pages(file, getters)
    # An infeasible task cannot be done with a network either.
    if not file.is_infeasible and re.search(r"https?://|\binstall\b", file.content["instruction"], re.IGNORECASE):
        yield Obstacle.INTERNET, "its instruction says to download or to install"
    for step in file.setup:
        if step["type"] in ("execute", "command") and _DOWNLOADS.search(_command(step)):
            yield Obstacle.INTERNET, "its setup installs or downloads"
    port_verbs = _WINDOWS_PORT_VERBS if file.os is GuestOs.WINDOWS else frozenset()
    for name in (*(set(verbs) & port_verbs), *(set(getters) & _PORT_GETTERS)):
        yield Obstacle.PORT, name
    yield from _missing_programs(file, host)


def _web_pages(file: OsworldFile, getters: Sequence[str]) -> Iterator[FoundObstacle]:
    if file.content.get("proxy"):
        yield Obstacle.RECORDING, "its pages are on the live web"
    yield from ((Obstacle.RECORDING, name) for name in getters if name in _WEB_GETTERS)
    for step in file.setup:
        if step["type"] == "chrome_open_tabs" and any(
            re.match(_WEB_PAGE, str(url)) for url in step["parameters"].get("urls_to_open", ())
        ):
            yield Obstacle.RECORDING, "it opens web pages"


def _missing_programs(file: OsworldFile, host: HostSupplies) -> Iterator[FoundObstacle]:
    if file.os not in host.packages:
        yield Obstacle.IMAGE, f"no image has {file.os.value}"
        return
    packages = host.packages[file.os]
    if packages is None:
        return
    named = {_APPLICATIONS.get(app.lower(), app.lower()) for app in file.content.get("related_apps") or ()}
    wanted = {name: _DOMAINS[name] for name in {file.domain, *named} if name in _DOMAINS}
    steps = (*file.setup, *(file.evaluator.get("postconfig") or ()), *getter_configs(file.evaluator, "result"))
    commands = " ".join(map(_command, steps))
    wanted |= {
        name: providers
        for name, providers in _PROGRAMS.items()
        if re.search(rf"(?<![\w./-]){name}(?![\w.-])", commands)
    }
    for name, providers in sorted(wanted.items()):
        if not any(package in packages for package in providers):
            yield Obstacle.APPLICATION, f"{name} (package {' or '.join(providers)})"


def _command(step: Mapping[str, Any]) -> str:
    """Return the command that a step or a getter runs in the guest, as one string; empty if it runs none."""
    command = (step.get("parameters") or step).get("command", "")
    return command if isinstance(command, str) else " ".join(map(str, command))
