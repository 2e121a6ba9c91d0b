"""`envd episodes` against a daemon with drawn desktops, over real sockets."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from cuaenv.client import AsyncEnvClient, AsyncEpisode, EpisodeInfo, EpisodeNotFound, State
from envd.api.security.tokens import new_token
from envd.base.config import SecurityConfig
from envd.cli.remote import SortKey, duration_text, episode_table, selected
from tests.support.command import CommandOutput, run_envd
from tests.support.daemon import write_tokens
from tests.support.server import FakeServer, serve_fake

TASK = "fake/count-to-five"
NOW = datetime(2026, 1, 2, tzinfo=UTC)


async def envd(server: FakeServer, *words: str, token: str = "") -> CommandOutput:
    variables = {"ENVD_TARGET": server.address, "COLUMNS": "200", **({"ENVD_TOKEN": token} if token else {})}
    return await asyncio.to_thread(run_envd, *words, **variables)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[FakeServer, Sequence[AsyncEpisode]]]:
    """A server with two episodes of the run `red` and one of `blue`."""
    async with (
        serve_fake(size=4) as server,
        AsyncEnvClient(server.address, run="red") as red,
        AsyncEnvClient(server.address, run="blue") as blue,
        red.reset_group(TASK, size=2) as pair,
        blue.reset("fake/save-note") as single,
    ):
        yield server, [*pair, single]


def info(episode_id: str, **changes: object) -> EpisodeInfo:
    made = EpisodeInfo(
        episode_id=episode_id,
        group_id="g",
        parent_episode_id="",
        task_id="fake/t",
        pool="fake",
        run="",
        state=State.ACTIVE,
        end_reason="",
        step_count=0,
        max_steps=9,
        create_time=NOW,
        expire_time=NOW,
        host="h:1",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


async def test_episodes_are_listed_filtered_and_shown() -> None:
    async with opened() as (server, episodes):
        everything = await envd(server, "episodes", "list")
        blue = await envd(server, "episodes", "list", "--run", "blue", "--json")
        none = await envd(server, "episodes", "list", "--pool", "other")
        shown = await envd(server, "episodes", "show", episodes[0].episode_id, "--json")
    assert everything.status == 0, everything.err
    lines = everything.out.splitlines()
    assert [line.split()[0] for line in lines] == ["episode", *(episode.episode_id for episode in episodes)]
    assert "fake/save-note" in lines[3]
    (only,) = json.loads(blue.out)["episodes"]
    assert (only["episode_id"], only["run"], only["state"]) == (episodes[2].episode_id, "blue", "active")
    assert (none.status, none.out) == (0, "")
    assert "3 in all" in none.err
    assert json.loads(shown.out)["group_id"] == episodes[0].group_id


async def test_close_releases_the_machine_and_an_unknown_id_closes_nothing() -> None:
    async with opened() as (server, episodes):
        first, second = episodes[0].episode_id, episodes[1].episode_id
        unknown = await envd(server, "episodes", "close", "--yes", first, "e-unknown", "--json")
        unconfirmed = await envd(server, "episodes", "close", first)
        assert await episodes[0].observe()
        closed = await envd(server, "episodes", "close", "--yes", first)
        with pytest.raises(EpisodeNotFound):
            await episodes[0].observe()
        left = json.loads((await envd(server, "episodes", "list", "--json")).out)["episodes"]
    assert unknown.status == 1
    assert json.loads(unknown.out)["error"]["reason"] == "EPISODE_NOT_FOUND"
    assert "episode e-unknown: not found" in unknown.err
    assert unconfirmed.status == 2
    assert "add --yes" in unconfirmed.err
    assert (closed.status, closed.out) == (0, f"closed {first}\n")
    assert [one["episode_id"] for one in left] == [second, episodes[2].episode_id]


async def test_a_token_of_scope_read_lists_but_does_not_close(tmp_path: Path) -> None:
    reader, runner = new_token("reader", "read"), new_token("runner", "run")
    tokens = write_tokens(tmp_path, [reader, runner])
    async with (
        serve_fake(security=SecurityConfig(tokens_file=tokens)) as server,
        AsyncEnvClient(server.address, token=runner.secret) as client,
        client.reset(TASK) as episode,
    ):
        listed = await envd(server, "episodes", "list", "--json", token=reader.secret)
        closed = await envd(server, "episodes", "close", "--yes", episode.episode_id, token=reader.secret)
        without = await envd(server, "episodes", "list")
        assert await episode.observe()
        own = await envd(server, "episodes", "close", "--yes", episode.episode_id, token=runner.secret)
    assert [one["episode_id"] for one in json.loads(listed.out)["episodes"]] == [episode.episode_id]
    assert closed.status == 1
    assert "scope read" in closed.err
    assert without.status == 1
    assert own.status == 0, own.err


def test_wrong_addresses_and_certificates_are_usage_errors(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.pem")
    cases = {
        ("--envd", "one two:1"): "white space",
        ("--tls-ca", absent): "absent.pem: cannot be read",
        ("--tls-cert", absent): "add --tls-ca",
    }
    for words, problem in cases.items():
        done = run_envd("episodes", "list", *words)
        assert done.status == 2
        assert problem in done.err


def test_episodes_are_sorted_by_a_column_and_then_by_age() -> None:
    old = info("old", task_id="b", step_count=5, create_time=NOW - timedelta(hours=1))
    new = info("new", task_id="a", step_count=5, expire_time=NOW + timedelta(minutes=1))

    def order(sort: SortKey, *, reverse: bool = False) -> list[str]:
        return [one.episode_id for one in selected([new, old], pool=None, run=None, sort=sort, reverse=reverse)]

    assert {key: order(key) for key in SortKey} == {
        SortKey.AGE: ["old", "new"],
        SortKey.LEASE: ["old", "new"],
        SortKey.STEPS: ["old", "new"],
        SortKey.TASK: ["new", "old"],
        SortKey.RUN: ["old", "new"],
        SortKey.POOL: ["old", "new"],
        SortKey.STATE: ["old", "new"],
    }
    assert order(SortKey.TASK, reverse=True) == ["old", "new"]


def test_text_of_clients_does_not_control_the_terminal() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(episode_table([info("e1", run="[bold]\x1b[2J\x07red")], now=NOW))
    text = console.export_text(styles=True)
    assert "[bold]\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}red" in text


def test_durations_are_short() -> None:
    assert [duration_text(s) for s in (-1, 59.4, 200, 18420, 183600)] == ["0s", "59s", "3m20s", "5h07m", "2d03h"]
