"""The commands of `envd deploy`: the units, rules, dashboards, manifests and settings that the documentation names.

They are in the wheel, and in a checkout below `deploy/` and `docs/learning/settings/`.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.terminal import Json, emit, out
from cuaenv.problems import did_you_mean
from envd.base.errors import ConfigError
from envd.cli.command import command

_PACKAGE = Path(__file__).parents[1]
#: Directories by the name that their files have here: of the wheel, or of a checkout.
_ROOTS = (
    ("", (_PACKAGE / "deploy", _PACKAGE.parent / "deploy")),
    ("learning/", (_PACKAGE.parent / "docs/learning/settings",)),
)

app = typer.Typer(no_args_is_help=True, help="Show or copy units, alert rules, dashboards, manifests and settings.")


def deploy_files() -> Mapping[str, Path]:
    """Return the files by name, such as `systemd/envd.service`."""
    found: dict[str, Path] = {}
    for prefix, roots in _ROOTS:
        root = next((root for root in roots if root.is_dir()), None)
        if root is not None:
            found |= {f"{prefix}{path.relative_to(root)}": path for path in sorted(root.rglob("*")) if path.is_file()}
    return found


@app.command("list")
@command()
def list_(*, as_json: Json = False) -> None:
    """List the files."""
    names = list(deploy_files())
    emit({"files": names}, "\n".join(names), as_json=as_json)


@app.command("show")
@command()
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="A file that `envd deploy list` names.")]) -> None:
    """Print a file."""
    files = deploy_files()
    if name not in files:
        raise ConfigError(f"{name}: no such file{did_you_mean(name, files) or '; `envd deploy list` lists them'}")
    typer.echo(files[name].read_text(encoding="utf-8"), nl=False)


@app.command("copy")
@command()
def copy(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
) -> None:
    """Copy all files into a new directory."""
    try:
        directory.mkdir(parents=True)
        for name, path in deploy_files().items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, directory / name)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror or error}; choose a new directory") from error
    out.print(f"copied {len(deploy_files())} files to {directory}", markup=False, soft_wrap=True)
