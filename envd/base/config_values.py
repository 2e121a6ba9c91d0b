"""Types of the settings' values: each checks and normalises one, and its error says what is expected.

Also the directories that are used by default, which depend on the user.
"""

import os
import pwd
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from cuaenv.region import Region

#: Prefix of a suite that is part of envd but served only on request.
BUILTIN_TASKS = "builtin:"
#: Suites whose tasks are read from a directory, `SUITE:DIR`: CUA-Gym's bundles, and a checkout of OpenComputer.
CUA_GYM = "cua-gym"
OPENCOMPUTER = "opencomputer"
DIRECTORY_SUITES = (CUA_GYM, OPENCOMPUTER)

#: The protocols of `compat`, and their ports on loopback, which are those of the servers that they replace.
COMPAT_PORTS: Mapping[str, int] = {
    "slime-osworld": 8100,
    "areal": 8000,
    "areal-sandbox": 8001,
    "windows-vm": 8765,
    "e2b": 3000,
}

_LOOPBACK = re.compile(r"(127(?:\.\d{1,3}){3}|localhost|\[::1\]):(\d{1,5})")
_ADDRESS = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
#: The colons of prefixes are not separators.
_PATH_SEPARATOR = re.compile(
    "".join(rf"(?<!\b{name})" for name in (BUILTIN_TASKS.removesuffix(":"), *DIRECTORY_SUITES)) + ":"
)
#: Prefix of a task file that assigns its tasks to a suite.
_SUITE_PREFIX = re.compile(r"[a-z0-9][a-z0-9_-]*=")
_SCREEN = re.compile(r"(\d{3,5})x(\d{3,5})")
_REGION = re.compile(r"(\d{1,5})x(\d{1,5})\+(\d{1,5})\+(\d{1,5})")
_KEYBOARD = re.compile(r"[a-z][a-z0-9_]*(?:\([a-z0-9_-]+\))?")
_ALLOWED_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9-]+)*(?::(\d{1,5}))?")


def _loopback(value: str) -> str:
    match = _LOOPBACK.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not HOST:PORT on loopback; without TLS and tokens only loopback is served")
    if int(match[2]) > 65535:
        raise ValueError(f"port {match[2]} is above 65535; choose a smaller one, or 0 for a free one")
    return value


def is_local(address: str) -> bool:
    """Return whether only this host can reach an address."""
    return address.startswith("unix:") or _LOOPBACK.fullmatch(address) is not None


def _listen(value: str) -> str:
    return value if re.fullmatch(r"unix:.+", value) else _host_port(value)


def _host_port(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match[2]) > 65535:
        return _loopback(value)
    # `Config` checks against `security` whether other hosts may reach it.
    return value


def compat_endpoint(value: str) -> str:
    """Return `NAME=HOST:PORT` for `NAME` or `NAME=HOST:PORT` of a protocol. Raises: ValueError."""
    name, equals, address = value.partition("=")
    if name not in COMPAT_PORTS:
        raise ValueError(f"{name!r} is not a protocol; use {', '.join(COMPAT_PORTS)}, each NAME or NAME=HOST:PORT")
    return f"{name}={_host_port(address)}" if equals else f"{name}=127.0.0.1:{COMPAT_PORTS[name]}"


def _comma_list(value: object) -> object:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _expanded(value: Path) -> Path:
    return Path(os.path.abspath(value.expanduser()))


def _task_file(value: str) -> str:
    if value.startswith(BUILTIN_TASKS):
        return value
    scheme, colon, directory = value.partition(":")
    if colon and scheme in DIRECTORY_SUITES:
        return f"{scheme}:{_expanded(Path(directory))}"
    suite, equals, path = value.partition("=") if _SUITE_PREFIX.match(value) else ("", "", value)
    return f"{suite}{equals}{_expanded(Path(path))}"


def _path_list(value: object) -> object:
    return [part for part in re.split(_PATH_SEPARATOR, value) if part] if isinstance(value, str) else value


def _screen(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _SCREEN.fullmatch(value)
    if match is None or not (320 <= int(match[1]) <= 7680 and 200 <= int(match[2]) <= 4320):
        raise ValueError(f"{value!r} is not WIDTHxHEIGHT in pixels; write a size from 320x200 to 7680x4320")
    return int(match[1]), int(match[2])


def _region(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _REGION.fullmatch(value)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ValueError(f"{value!r} is not WIDTHxHEIGHT+X+Y in pixels; write, for example, 120x24+1160+0")
    width_px, height_px, x_px, y_px = map(int, match.groups())
    return Region(x_px=x_px, y_px=y_px, width_px=width_px, height_px=height_px)


def _hypervisor_uri(value: str, info: ValidationInfo) -> str:
    if info.context is not None:
        info.context["check_uri"](value)
    return value


def _keyboard(value: str) -> str:
    layouts = value.split(",")
    if value and not (len(layouts) <= 4 and all(map(_KEYBOARD.fullmatch, layouts))):
        raise ValueError(f"{value!r} is not a keyboard layout; write up to four of XKB's, such as de or us(intl),ru")
    return value


def _allowed_host(entry: str) -> str:
    match = _ALLOWED_HOST.fullmatch(entry)
    if match is None or not 1 <= int(match[1] or 80) <= 65535:
        raise ValueError(f"{entry!r} is not a host; write a name, *.NAME or an IPv4 address, with :PORT or without")
    return entry.lower()


def _http_url(value: str) -> str:
    if value and not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s?#]*)?", value):
        raise ValueError(f"{value!r} is not a URL; write http://HOST:PORT or https://HOST:PORT")
    return value


Listen = Annotated[str, AfterValidator(_listen)]
HostPort = Annotated[str, AfterValidator(_host_port)]
ConsoleListen = Annotated[str, AfterValidator(lambda value: value and _host_port(value))]
CompatEndpoint = Annotated[str, AfterValidator(compat_endpoint)]
Directory = Annotated[Path, AfterValidator(_expanded)]
TaskFile = Annotated[str, AfterValidator(_task_file)]
#: (width, height) in pixels.
Screen = Annotated[tuple[int, int], BeforeValidator(_screen)]
ScreenRegion = Annotated[Region, BeforeValidator(_region)]
KeyboardLayout = Annotated[str, AfterValidator(_keyboard)]
AllowedHost = Annotated[str, AfterValidator(_allowed_host)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
HypervisorUri = Annotated[str, AfterValidator(_hypervisor_uri)]
#: A list in TOML, or its entries in a variable: separated by commas, or as in PATH by colons.
CommaList = BeforeValidator(_comma_list)
PathList = BeforeValidator(_path_list)


def default_state_dir() -> Path:
    """Return `/var/lib/envd` for root, else `envd` in the user's XDG state directory."""
    if os.geteuid() == 0:
        return Path("/var/lib/envd")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "envd"


def default_cache_dir() -> Path:
    """Return `envd` in the user's XDG cache directory; under sudo, in that of the user who runs sudo.

    So an image that `sudo envd image build` makes is where the user's own daemon looks for it.
    """
    home = Path.home()
    if (user := sudo_user()) is not None:
        home = Path(user.pw_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "envd"


def sudo_user() -> pwd.struct_passwd | None:
    """Return the user who runs this process by sudo; None without sudo."""
    name = os.environ.get("SUDO_USER", "")
    if os.geteuid() != 0 or name in {"", "root"}:
        return None
    with suppress(KeyError):
        return pwd.getpwnam(name)
    return None
