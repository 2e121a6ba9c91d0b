"""What the host provides to setups: fetched files, the guest's password and a foreign suite's code."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from envd.base.errors import GuestError
from envd.tasks.assets import AssetCache, AssetMissing, open_http
from envd.tasks.bridge import TaskBridge
from envd.tasks.checkers.base import Judge, judge_directly
from envd.tasks.fields import AssetRef

#: Limit of a download while an episode waits.
_FETCH_TIMEOUT_S = 300.0

_PASSWORD = "{CLIENT_PASSWORD}"  # noqa: S105 - its name


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupResources:
    """What a daemon provides to its setups."""

    assets: AssetCache | None = None
    """Fetched files; None without a cache."""
    allow_download: bool = False
    """Whether a file that was not fetched ahead of time is downloaded while an episode waits."""
    client_password: str = field(default="", repr=False)
    """Password of the guests' user."""
    bridge: TaskBridge | None = None
    """Runs the setup of a foreign suite (OSWorld); None if it is not installed."""
    judge: Judge = judge_directly
    """Runs the pure part of checkers, which show that the start is not already solved."""

    async def asset(self, ref: AssetRef) -> bytes:
        """Return a fetched file. Raises: GuestError: It is missing; says how to get it."""
        if self.assets is None:
            raise GuestError(f"{ref.url}: this daemon has no asset cache")
        try:
            if self.allow_download and not self.assets.has(ref):
                async with open_http(timeout_s=_FETCH_TIMEOUT_S) as http:
                    await self.assets.fetch(ref, http)
            return await asyncio.to_thread(self.assets.read, ref)
        except AssetMissing as error:
            raise GuestError(str(error)) from error

    async def host_file(self, path: str) -> bytes:
        """Return a file that comes with the tasks. Raises: GuestError: It cannot be read."""
        try:
            return await asyncio.to_thread(Path(path).read_bytes)
        except OSError as error:
            raise GuestError(f"{path} cannot be read: {error.strerror}") from error

    def fill_in(self, argv: tuple[str, ...], *, screen_px: tuple[int, int]) -> tuple[str, ...]:
        """Return a command with its placeholders replaced by the guest's password and screen size.

        Raises:
            GuestError: It contains the password's placeholder, and no password is configured.
        """
        width_px, height_px = screen_px
        if not self.client_password and any(_PASSWORD in word for word in argv):
            raise GuestError(f"the command uses {_PASSWORD}, but none is configured; set tasks.client_password_file")
        values = {
            _PASSWORD: self.client_password,
            "{SCREEN_WIDTH}": str(width_px),
            "{SCREEN_HEIGHT}": str(height_px),
            "{SCREEN_WIDTH_HALF}": str(width_px // 2),
            "{SCREEN_HEIGHT_HALF}": str(height_px // 2),
        }
        return tuple(_replaced(word, values) for word in argv)


def _replaced(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
