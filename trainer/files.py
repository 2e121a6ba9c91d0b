"""Files that are replaced as a whole."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically: after a crash it has either its previous or its new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
