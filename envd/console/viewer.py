"""One open page: what it has received, which pictures it shows, and what to send next."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from envd.console.board import Board
from envd.console.pictures import PagePicture, Pictures, PictureSize, PictureSource
from envd.console.runs import Facts

#: Tiles of one page that carry pictures at the same time; further ones show facts alone.
MAX_TILES = 512


class Viewer:
    """The state of one stream. Nothing is queued: the next update is made from what has changed since the last."""

    def __init__(self, board: Board, pictures: Pictures, *, caller: str, may_see: Callable[[str], bool]) -> None:
        self.view_id = secrets.token_urlsafe(16)
        self.caller = caller
        self._board = board
        self._pictures = pictures
        self._may_see = may_see
        self._changed = asyncio.Event()
        self._sources: dict[tuple[str, PictureSize], PictureSource] = {}
        self._sent_episodes: dict[str, Facts] = {}
        self._sent_pools: list[Facts] | None = None
        self._sent_runs: list[Facts] | None = None
        self._sent_pictures: dict[tuple[str, PictureSize], tuple[PagePicture | None, str]] = {}
        board.listen(self.wake)

    def wake(self) -> None:
        self._changed.set()

    async def wait(self, *, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def select(self, tiles: Iterable[str], full: str, *, live: bool = False) -> None:
        """Show the pictures of these tiles, and of one episode in full; ids that the viewer may not see are ignored.

        With `live` the full view changes often: its person acts.
        """
        wanted = {(episode_id, PictureSize.TILE) for episode_id in list(tiles)[:MAX_TILES]}
        if full:
            wanted.add((full, PictureSize.LIVE if live else PictureSize.FULL))
        wanted = {key for key in wanted if key[0] in self._sent_episodes}
        for key in self._sources.keys() - wanted:
            self._drop(key)
        for key in wanted - self._sources.keys():
            self._sources[key] = self._pictures.subscribe(*key, self.wake)
        self.wake()

    def updates(self) -> Iterator[bytes]:
        """Yield everything that has changed since the last call, as server-sent events."""
        board = self._board
        seen = {key: facts for key, facts in board.episodes.items() if self._may_see(facts["owner"])}
        changed = [facts for key, facts in seen.items() if self._sent_episodes.get(key) is not facts]
        removed = [key for key in self._sent_episodes if key not in seen]
        for episode_id in removed:
            for size in PictureSize:
                if (episode_id, size) in self._sources:
                    self._drop((episode_id, size))
        pools = None if self._sent_pools is board.pools else [self._visible(pool) for pool in board.pools]
        runs = None if self._sent_runs is board.runs else self._of_visible(board.runs)
        if changed or removed or pools is not None or runs is not None:
            self._sent_episodes, self._sent_pools, self._sent_runs = seen, board.pools, board.runs
            facts = {"episodes": changed, "removed": removed, "pools": pools, "runs": runs}
            yield event("state", {"now": board.now_s, **facts})
        for key, source in list(self._sources.items()):
            newest = (source.picture, source.problem)
            if newest == (None, "") or self._sent_pictures.get(key) == newest:
                continue
            known, _ = self._sent_pictures.get(key, (None, ""))
            self._sent_pictures[key] = newest
            yield event("picture", _picture_message(source, known))

    def close(self) -> None:
        self._board.unlisten(self.wake)
        for key in list(self._sources):
            self._drop(key)

    def _visible(self, pool: Facts) -> Facts:
        return {**pool, "queue": self._of_visible(pool["queue"])}

    def _of_visible(self, facts: Iterable[Facts]) -> list[Facts]:
        """Return those of owners that the viewer may see."""
        return [each for each in facts if self._may_see(each["owner"])]

    def _drop(self, key: tuple[str, PictureSize]) -> None:
        self._pictures.unsubscribe(self._sources.pop(key), self.wake)
        self._sent_pictures.pop(key, None)


def event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _picture_message(source: PictureSource, known: PagePicture | None) -> dict[str, Any]:
    picture = source.picture
    message: dict[str, Any] = {"id": source.episode_id, "size": source.size.name.lower(), "problem": source.problem}
    if picture is not None:
        message |= {"screen": picture.screen_px, "pointer": picture.pointer_px}
        # Only the pointer has moved.
        if known is None or known.frame_id != picture.frame_id:
            message["jpeg"] = picture.jpeg_base64
    return message
