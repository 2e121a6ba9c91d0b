"""Decompression of files from other hosts."""

from pathlib import Path

import zstandard


def read_compressed(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a compressed file. Blocks. Raises: OSError; ValueError: it is damaged, or longer.

    `ZstdDecompressor.decompress` allocates the size that the file claims, whatever its limit: 3.2 GiB for 108 KiB.
    """
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as packed:
            data = packed.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if len(data) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes} bytes")
    return data
