"""What the commands of `envd image` share: the option `--screen`, their output, the owner of what they create."""

import os
import re
from dataclasses import asdict
from pathlib import Path

from cuaenv.cli.terminal import emit_json, err, out
from envd.base.config_values import default_cache_dir, sudo_user
from envd.base.errors import ConfigError
from envd.images.catalogue import Image


def give_to_sudo_user(cache_dir: Path) -> None:
    """Under sudo, make the invoking user the owner of what root created in that user's cache."""
    user = sudo_user()
    if user is None or cache_dir != default_cache_dir():
        return
    for _, directories, files, handle in os.fwalk(cache_dir):
        for name in (".", *directories, *files):
            if os.stat(name, dir_fd=handle, follow_symlinks=False).st_uid == 0:
                os.chown(name, user.pw_uid, user.pw_gid, dir_fd=handle, follow_symlinks=False)
    err.print(f"the cache {cache_dir} belongs to {user.pw_name}", markup=False, soft_wrap=True)


def parse_screen(text: str) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT. Raises: ConfigError."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise ConfigError(f"--screen {text}: not a size; write WIDTHxHEIGHT, such as 1280x800")
    return int(match[1]), int(match[2])


def print_image(image: Image, *, as_json: bool) -> None:
    """Print one image, as JSON or one field a line."""
    fields = asdict(image)
    if as_json:
        emit_json(fields)
        return
    for key, value in fields.items():
        text = ", ".join(f"{part}={of}" for part, of in value.items()) if isinstance(value, dict) else value
        if isinstance(value, tuple):
            text = ", ".join(value)
        if text != "":
            out.print(f"{key:<18} {text}", markup=False, soft_wrap=True)
