"""The files from which users build a container image of the desktop with podman, buildah or docker."""

from importlib.resources import files
from pathlib import Path

from envd.images.recipe import desktop_recipe, for_containers, overlay_files, write_files

_CONTAINERFILE = (files("envd.images") / "Containerfile").read_text(encoding="ascii")


def write_container_files(directory: Path) -> None:
    """Write a Containerfile and the desktop's files into a new directory. Raises: OSError."""
    directory.mkdir(parents=True)
    recipe = for_containers(desktop_recipe())
    packages = "".join(f"{name}\n" for name in recipe.packages)
    write_files(overlay_files(recipe) | {"usr/lib/envd/packages.txt": packages.encode()}, directory / "desktop")
    (directory / "Containerfile").write_text(_CONTAINERFILE, encoding="ascii")
