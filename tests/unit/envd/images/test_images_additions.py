"""What a user adds to an image: packages, files, a script."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from envd.base.errors import ImageError
from envd.images.additions import added_files, with_packages
from envd.images.build import _InstallOutput
from envd.images.recipe import USER_SCRIPT, desktop_recipe, office_recipe, overlay_files, recipe_digest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in {"etc/motd": "hello\n", "home/user/.config/app.ini": "[app]\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def digest(packages: Sequence[str] = (), directory: Path | None = None, script: Path | None = None) -> str:
    recipe = with_packages(desktop_recipe(), packages)
    return recipe_digest(recipe, overlay_files(recipe) | added_files(directory, script))


def test_packages_files_and_script_each_change_the_digest(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("script") / "install"
    script.write_text("#!/bin/sh\n")
    before = digest(directory=tree)
    assert len({digest(), digest(packages=["gedit"]), before, digest(script=script)}) == 4
    (tree / "etc/motd").write_text("other\n")
    assert digest(directory=tree) != before
    assert digest() == recipe_digest(desktop_recipe(), overlay_files(desktop_recipe()))


def test_files_of_the_home_directory_are_added_to_its_skeleton_and_a_package_once(tree: Path) -> None:
    assert added_files(tree, None) == {"etc/motd": b"hello\n", "etc/skel/.config/app.ini": b"[app]\n"}
    recipe = with_packages(desktop_recipe(), ["gedit", "openbox", "vim=2:9.0.1378-2"])
    assert recipe.packages == (*desktop_recipe().packages, "gedit", "vim=2:9.0.1378-2")


@pytest.mark.parametrize("name", ["", "a b", "-o=x", "Gedit", "a;b", "../a"])
def test_a_word_that_is_not_a_package_name_is_refused(name: str) -> None:
    with pytest.raises(ImageError, match="not a package name"):
        with_packages(desktop_recipe(), [name])


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda tree: (tree / "etc/passwd").symlink_to("/etc/passwd"), "a link, which may lead outside"),
        (lambda tree: (tree / "var").symlink_to(tree.parent), "a link, which may lead outside"),
        (lambda tree: os.mkfifo(tree / "etc/pipe"), "not an ordinary file"),
        (lambda tree: (tree / "usr/lib/envd").mkdir(parents=True), None),
        (lambda tree: os.truncate(tree / "etc/motd", (1 << 30) + 1), "more than 1024 MiB"),
    ],
)
def test_files_that_mislead_the_build_are_refused(
    tree: Path, spoil: Callable[[Path], object], problem: str | None
) -> None:
    spoil(tree)
    if problem is None:  # an empty directory adds nothing; a file in it would replace one of envd
        assert len(added_files(tree, None)) == 2
        (tree / "usr/lib/envd/session").write_text("#!/bin/sh\n")
        problem = "envd's own files"
    with pytest.raises(ImageError, match=problem):
        added_files(tree, None)


def test_a_script_without_an_interpreter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "install").write_text("apt install x\n")
    with pytest.raises(ImageError, match="begins with #!"):
        added_files(None, tmp_path / "install")


def output_of(*lines: str) -> tuple[_InstallOutput, list[tuple[str, float]]]:
    reports: list[tuple[str, float]] = []
    output = _InstallOutput(lambda stage, fraction: reports.append((stage, fraction)))
    for line in lines:
        output(f"{line}\n")
    return output, reports


def test_packages_that_do_not_exist_are_named() -> None:
    output, _ = output_of(
        "E: Unable to locate package nosuch", "E: Package 'virtual' has no installation candidate", "E: apt failed"
    )
    error = output.explain(desktop_recipe(), ImageError("apt failed"))
    assert "package nosuch, virtual: not in the archive of debian bookworm (main)" in str(error)


def test_a_script_that_fails_is_reported_with_its_status_and_last_lines() -> None:
    before = ["Setting up libc6 (2.36) ...", "envd: script: started"]
    output, reports = output_of(*before, *map(str, range(40)), "envd: script: failed with status 7", "E: hook failed")
    error = str(output.explain(desktop_recipe(), ImageError("mmdebstrap failed")))
    assert error.splitlines()[0] == "--run: the script failed with status 7:"
    assert error.splitlines()[1:] == [str(number) for number in range(15, 40)]
    assert reports[-1][0] == "running the script"


def test_steps_of_mmdebstrap_are_reported_in_our_words() -> None:
    copy = """sh -c 'cp -r /root/.cache/envd/images/.staging-1/overlay/. "$1/"' exec /root/image"""
    _, reports = output_of(
        "I: using /tmp/mmdebstrap.x as tempdir",
        "I: running apt-get update...",
        f"I: running --extract-hook in shell: {copy}",
        "I: installing essential packages...",
        "Setting up libc6:amd64 (2.36) ...",
        f"I: running --customize-hook in shell: {copy}",
        "I: running special hook: tar-in /root/.cache/envd/images/.staging-1/overlay.tar /",
        "I: success in 61.1 seconds",
    )
    assert [step for step, _ in reports] == [
        "reading the lists of packages",
        "copying our files",
        "installing the base system",
        "installing libc6",
        "configuring",
        "copying our files",
    ]


def test_another_failure_stays_as_it_is() -> None:
    output, _ = output_of("E: no space left on device")
    failure = ImageError("mmdebstrap failed")
    assert output.explain(desktop_recipe(), failure) is failure


def test_progress_follows_the_number_of_packages_that_apt_installs() -> None:
    lines = ["0 upgraded, 1000 newly installed, 0 to remove", "Unpacking a:amd64 (1) ...", "Setting up a (1)"]
    _, reports = output_of("Unpacking libc6:amd64 (2.36)", *lines)
    assert [stage for stage, _ in reports] == ["installing libc6", "installing a", "installing a"]
    assert reports[-1][1] == pytest.approx(0.1 + 0.7 * 3 / 2001)


def test_the_office_image_extends_the_desktop_image_and_says_what_it_has() -> None:
    recipe = office_recipe()
    desktop, overlay = overlay_files(desktop_recipe()), overlay_files(recipe)
    assert set(desktop_recipe().packages) < set(recipe.packages)
    assert {path: overlay[path] for path in desktop} == desktop
    assert {"gimp", "libreoffice_calc"} <= set(recipe.provides)
    # Its window needs OpenGL, which the X server of the images does not have.
    assert "blender" not in recipe.provides
    assert USER_SCRIPT not in overlay
    assert "etc/sudoers.d/envd-osworld" not in overlay
