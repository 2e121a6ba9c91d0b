"""`envd image build`: builds guest images, one command for each recipe."""

from typing import Annotated

import typer

from cuaenv.cli.lazy import lazy_group
from cuaenv.cli.terminal import Json, progress
from envd.base.config import Config
from envd.base.errors import ConfigError
from envd.base.terminal import reports_errors, stop_on_sigterm
from envd.cli.image_output import give_to_sudo_user, print_image
from envd.cli.options import with_settings
from envd.images.build import build_image
from envd.images.catalogue import ImageCatalogue
from envd.images.recipe import Recipe, desktop_recipe, osworld_recipe, wine_recipe

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


@app.command("desktop")
@reports_errors
@with_settings("cache_dir")
def desktop(
    settings: Config,
    *,
    distribution: Annotated[str, typer.Option(help="debian or ubuntu.")] = "debian",
    suite: Annotated[str, typer.Option(help="Release of the distribution.", show_default="bookworm or noble")] = "",
    mirror: Mirror = "",
    rebuild: Rebuild = False,
    as_json: Json = False,
) -> None:
    """Build the desktop of the built-in tasks: Debian or Ubuntu with Openbox."""
    try:
        recipe = desktop_recipe(distribution=distribution, suite=suite, mirror=mirror)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _build(settings, recipe, rebuild=rebuild, as_json=as_json)


@app.command("osworld")
@reports_errors
@with_settings("cache_dir")
def osworld(settings: Config, *, mirror: Mirror = "", rebuild: Rebuild = False, as_json: Json = False) -> None:
    """Build the desktop of OSWorld's tasks: Debian with LibreOffice, Chromium, GIMP and VLC."""
    _build(settings, osworld_recipe(mirror=mirror), rebuild=rebuild, as_json=as_json)


@app.command("wine")
@reports_errors
@with_settings("cache_dir")
def wine(settings: Config, *, mirror: Mirror = "", rebuild: Rebuild = False, as_json: Json = False) -> None:
    """Build a free stand-in for Windows: Debian with Wine, for tasks that need no Microsoft program."""
    _build(settings, wine_recipe(mirror=mirror), rebuild=rebuild, as_json=as_json)


def _build(settings: Config, recipe: Recipe, *, rebuild: bool, as_json: bool) -> None:
    stop_on_sigterm()
    with progress(f"image {recipe.name}") as report:
        image = build_image(recipe, ImageCatalogue(settings.cache_dir), progress=report, rebuild=rebuild)
    give_to_sudo_user(settings.cache_dir)
    print_image(image, as_json=as_json)
