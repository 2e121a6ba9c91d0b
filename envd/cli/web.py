"""`envd web`: install the proxy of web recordings, and list, show, export, import and remove recordings."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, emit_json, err, out, progress
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.options import config_options
from envd.cli.terminal import columns, printable, stop_on_sigterm
from envd.integrations.web.environment import WebEnvironment
from envd.integrations.web.recordings import WebRecordings, read_entries

app = typer.Typer(
    no_args_is_help=True, help="Recordings of the web pages that guests open, to replay without a network."
)

_Name = Annotated[str, typer.Argument(metavar="RECORDING", help="Name of a recording.")]


@app.command("install")
@command(config_options("cache_dir"))
def install(settings: Config) -> None:
    """Install mitmproxy and warcio into a separate virtual environment."""
    stop_on_sigterm()
    environment = WebEnvironment(settings.cache_dir)
    with progress("mitmproxy and warcio") as report:
        environment.install(progress=report)
    environment.authority()
    out.print(f"mitmproxy is in {environment.directory}", markup=False, soft_wrap=True)


@app.command("list")
@command(config_options("cache_dir"))
def list_(settings: Config, *, as_json: Json = False) -> None:
    """List the recordings of this host."""
    found = [
        (name, status.st_size, _time(status.st_mtime)) for name, status in WebRecordings(settings.asset_dir).list()
    ]
    if as_json:
        emit_json({"recordings": [{"name": name, "bytes": size, "time": time} for name, size, time in found]})
    elif found:
        rows = ((name, f"{size / 1024:.0f}", time) for name, size, time in found)
        out.print(columns(("recording", "KiB", "last recorded"), rows))
    else:
        err.print("no recordings; record one with `envd serve --web record --web-recording NAME`")


@app.command("show")
@command(config_options("cache_dir"))
def show(settings: Config, *, name: _Name, as_json: Json = False) -> None:
    """List the exchanges of a recording: method, status, URL, and size of the response. Reads and checks all of it."""
    entries = read_entries(WebRecordings(settings.asset_dir).path(name), WebEnvironment(settings.cache_dir))
    if as_json:
        emit_json({"name": name, "exchanges": entries})
        return
    for entry in entries:
        line = f"{entry['method']:<6} {entry['status']} {entry['size_bytes']:>9}  {entry['url']}"
        out.print(printable(line), markup=False, soft_wrap=True)
    out.print(f"{len(entries)} exchanges from {_time(min(entry['time_s'] for entry in entries))} on")


@app.command("export")
@command(config_options("cache_dir"))
def export(
    settings: Config, *, name: _Name, file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")]
) -> None:
    """Copy a recording to a WARC file. It has cookies and everything that was typed into pages."""
    if file.exists():
        raise ConfigError(f"{file}: already exists; choose another name")
    shutil.copyfile(WebRecordings(settings.asset_dir).path(name), file)


@app.command("import")
@command(config_options("cache_dir"))
def import_(
    settings: Config, *, name: _Name, file: Annotated[Path, typer.Argument(metavar="FILE", help="A .warc.gz file.")]
) -> None:
    """Add a WARC file as a recording, also one of another program if it has each request with its response."""
    count = WebRecordings(settings.asset_dir).add(name, file, WebEnvironment(settings.cache_dir))
    out.print(f"{name}: {count} exchanges", markup=False)


@app.command("rm")
@command(config_options("cache_dir"))
def remove(settings: Config, *, name: _Name) -> None:
    """Remove a recording, unless a daemon uses it."""
    WebRecordings(settings.asset_dir).remove(name)


def _time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
