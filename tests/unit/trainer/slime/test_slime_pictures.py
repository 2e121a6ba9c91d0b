"""Pictures in requests to engines, and in files that the engines read too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.slime import Processor, ScriptedEngine, Tokenizer, slime_engine, stand_in_slime
from trainer.agent.types import Message
from trainer.learn.server import file_of, picture_of
from trainer.slime.checks import require_readable
from trainer.slime.config import Halted
from trainer.tokens.chat import Chat
from trainer.tokens.picture_files import PictureFiles
from trainer.tokens.rows import Row


class Server(ScriptedEngine):
    """Reads what it can."""

    def __init__(self, *, reads_files: bool = True, works: bool = True) -> None:
        super().__init__(str)
        self.uris: list[str] = []
        self._reads_files = reads_files
        self._works = works

    async def post(self, url: str, payload: Mapping[str, Any], **options: Any) -> Any:
        (uri,) = payload["image_data"]
        self.uris.append(uri)
        if not self._works or (uri.startswith("file:") and not self._reads_files):
            raise ConnectionError("refused")
        assert picture_of(uri).size == (64, 64)
        return await super().post(url, payload, **options)


async def check(server: Server, directory: Path) -> bool:
    with stand_in_slime(server):
        in_files, in_requests = slime_engine(files=PictureFiles(str(directory))), slime_engine()
        return await require_readable(in_files, in_requests, Chat(Tokenizer(), Processor()), str(directory))


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*.png"))


async def test_the_file_that_an_engine_read_is_removed(tmp_path: Path) -> None:
    server = Server()
    assert await check(server, tmp_path)
    (uri,) = server.uris
    assert (path := file_of(uri)) is not None
    assert not path.exists()


async def test_an_engine_that_reads_no_files_halts_the_run(tmp_path: Path) -> None:
    with pytest.raises(Halted, match=r"envd\.picture_dir .*: engine http://.* does not read its files"):
        await check(Server(reads_files=False), tmp_path)
    assert files_in(tmp_path) == []


async def test_an_engine_that_fails_is_left_to_the_first_episode(tmp_path: Path) -> None:
    assert not await check(Server(works=False), tmp_path)
    assert files_in(tmp_path) == []


async def test_a_replaced_client_of_slime_is_used_and_gets_text() -> None:
    server = ScriptedEngine(lambda _: "x")
    with stand_in_slime(server):
        engine = slime_engine()
        row = Row(Chat(Tokenizer(), Processor()).opening([Message("user", (Image.new("RGB", (64, 64)),))]))
        engine.encode(row.images)
        sampled = await engine.sample(row, limit=5)
    assert (sampled.text, sampled.prompt_tokens) == ("x<|im_end|>", row.token_count)
    ((uri,),) = (request["image_data"] for request in server.requests)
    assert isinstance(uri, str)
