"""Pictures in files that engines read too."""

import socket
import uuid
from pathlib import Path

from PIL import Image

from trainer.learn.server import picture_of
from trainer.tokens.picture_files import PictureFiles


def test_files_have_the_images_until_they_are_removed(tmp_path: Path) -> None:
    files = PictureFiles(str(tmp_path / "a b"))
    images = [Image.new("RGB", (8, 4), colour) for colour in ("red", "blue")]
    addresses = [files.add(image) for image in images]
    for address, image in zip(addresses, images, strict=True):
        assert b'"' not in address
        assert picture_of(address.decode()).tobytes() == image.tobytes()
    files.remove(addresses[:1])
    files.remove(addresses[:1])
    assert [path.name for path in tmp_path.rglob("*.png")] == ["1.png"]


def test_only_what_killed_processes_of_this_host_left_is_removed(tmp_path: Path) -> None:
    left, host = uuid.uuid4().hex, socket.gethostname()
    live = PictureFiles(str(tmp_path)).add(Image.new("RGB", (8, 4)))
    # Of hosts whose names begin with ours.
    kept = {f"{host}-0-{left}", f"{host}-worker-77", f"elsewhere-{left}"}
    for name in (f"{host}-{left}", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    # A process in another container may have the same host name, and any process id.
    PictureFiles(str(tmp_path))
    assert picture_of(live.decode()).size == (8, 4)
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == len(kept) + 2
    assert kept < names
