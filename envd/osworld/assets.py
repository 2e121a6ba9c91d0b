"""Files that OSWorld's tasks would download, as they were fetched ahead of time."""

import hashlib
from pathlib import Path


class FetchedAssets:
    """The asset cache of this host, asked by URL."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, url: str) -> Path | None:
        """Return a URL's file; None where it was not fetched."""
        path = self.root / hashlib.sha256(url.encode()).hexdigest()
        return path if path.is_file() else None


def fetched_assets(cache_dir: Path) -> FetchedAssets:
    """Return the asset cache under a cache directory."""
    return FetchedAssets(cache_dir / "assets")
