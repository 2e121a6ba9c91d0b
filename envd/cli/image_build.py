"""`envd image build`: builds guest images, one command for each recipe."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cuaenv.cli.lazy import lazy_group
from cuaenv.cli.terminal import Json, progress
from envd.base.config import Config, check_image_name
from envd.base.errors import ConfigError
from envd.cli.command import command
from envd.cli.image_output import give_to_sudo_user, print_image
from envd.cli.options import config_options
from envd.cli.terminal import stop_on_sigterm
from envd.images.additions import added_files, with_packages
from envd.images.build import build_image
from envd.images.catalogue import ImageCatalogue
from envd.images.recipe import ImageRecipe, desktop_recipe, for_containers, office_recipe, osworld_recipe, wine_recipe

_COMMANDS = {
    "windows": (
        "envd.cli.image_build_windows:windows",
        "Install Windows from its ISO, prove that it works for agents, and seal it. Takes 20 to 60 minutes with KVM.",
    )
}

app = typer.Typer(
    cls=lazy_group(_COMMANDS),
    no_args_is_help=True,
    help="Build a guest image unless it exists. Debian images require root.",
)

Mirror = Annotated[str, typer.Option(help="Package archive to install from.", show_default="the host's own")]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Build even if the image exists.")]
Name = Annotated[str, typer.Option(help="Name of the image.", show_default="the recipe's")]
Packages = Annotated[str, typer.Option(metavar="A,B", help="Packages to install in addition.")]
Files = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Files to add: a directory that is laid out as the guest's root.")
]
Script = Annotated[
    Path | None, typer.Option("--run", metavar="SCRIPT", help="Script to run in the new system as root, at the end.")
]

#: Names that only their own recipes give to images.
_RESERVED = frozenset({"desktop", "desktop-ubuntu", "office", "osworld", "wine"})


@app.command("desktop")
@command(config_options("cache_dir"))
def desktop(
    settings: Config,
    *,
    distribution: Annotated[str, typer.Option(help="debian or ubuntu.")] = "debian",
    suite: Annotated[str, typer.Option(help="Release of the distribution.", show_default="bookworm or noble")] = "",
    name: Name = "",
    packages: Packages = "",
    files: Files = None,
    run: Script = None,
    mirror: Mirror = "",
    containers: Annotated[
        bool, typer.Option("--containers", help="Only for containers: without a kernel, and built without root.")
    ] = False,
    rebuild: Rebuild = False,
    as_json: Json = False,
) -> None:
    """Build the desktop of the built-in tasks: Debian or Ubuntu with Openbox, and what you add."""
    try:
        recipe = desktop_recipe(distribution=distribution, suite=suite, mirror=mirror)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    recipe = for_containers(recipe) if containers else recipe
    recipe, added = _extended(recipe, name=name, packages=packages, files=files, run=run)
    _build(settings, recipe, added, rebuild=rebuild, as_json=as_json)


@app.command("office")
@command(config_options("cache_dir"))
def office(
    settings: Config,
    *,
    name: Name = "",
    packages: Packages = "",
    files: Files = None,
    run: Script = None,
    mirror: Mirror = "",
    rebuild: Rebuild = False,
    as_json: Json = False,
) -> None:
    """Build the desktop with large applications: LibreOffice, GIMP, Inkscape, FreeCAD, browsers and others."""
    recipe, added = _extended(office_recipe(mirror=mirror), name=name, packages=packages, files=files, run=run)
    _build(settings, recipe, added, rebuild=rebuild, as_json=as_json)


@app.command("osworld")
@command(config_options("cache_dir"))
def osworld(settings: Config, *, mirror: Mirror = "", rebuild: Rebuild = False, as_json: Json = False) -> None:
    """Build the desktop of OSWorld's tasks: Debian with LibreOffice, Chromium, GIMP and VLC."""
    _build(settings, osworld_recipe(mirror=mirror), {}, rebuild=rebuild, as_json=as_json)


@app.command("wine")
@command(config_options("cache_dir"))
def wine(settings: Config, *, mirror: Mirror = "", rebuild: Rebuild = False, as_json: Json = False) -> None:
    """Build a free stand-in for Windows: Debian with Wine, for tasks that need no Microsoft program."""
    _build(settings, wine_recipe(mirror=mirror), {}, rebuild=rebuild, as_json=as_json)


def _extended(
    recipe: ImageRecipe, *, name: str, packages: str, files: Path | None, run: Path | None
) -> tuple[ImageRecipe, dict[str, bytes]]:
    """Return a recipe under its own name, with more packages, and the added files. Raises: ConfigError, ImageError."""
    names = tuple(filter(None, (each.strip() for each in packages.split(","))))
    if not name and (names or files or run):
        raise ConfigError("--name: missing; an image with --packages, --files or --run needs a name of its own")
    if not name:
        return recipe, {}
    try:
        check_image_name(name)
    except ValueError as error:
        raise ConfigError(f"--name {error}") from error
    if name in _RESERVED:
        raise ConfigError(f"--name {name}: the name of a recipe of envd; choose another")
    return with_packages(replace(recipe, name=name), names), added_files(files, run)


def _build(settings: Config, recipe: ImageRecipe, added: dict[str, bytes], *, rebuild: bool, as_json: bool) -> None:
    stop_on_sigterm()
    with progress(f"image {recipe.name}") as report:
        image = build_image(recipe, ImageCatalogue(settings.cache_dir), added=added, progress=report, rebuild=rebuild)
    give_to_sudo_user(settings.cache_dir)
    print_image(image, as_json=as_json)
