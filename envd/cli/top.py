"""`envd top`: pools, the queue and episodes of running daemons, updated until `q` or Ctrl-C."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live

from cuaenv.cli.terminal import Json, emit_json, out
from cuaenv.client import AsyncEnvClient, EnvError
from envd.cli.command import command
from envd.cli.remote import CALL_TIMEOUT, DAEMON_OPTIONS, PoolFilter, RemoteDaemon, Reverse, RunFilter, Sort, SortKey
from envd.cli.top_view import Facts, Options, fitted, render

_KEYS = "q quit   s sort   r reverse"


@command(DAEMON_OPTIONS)
def top(
    daemon: RemoteDaemon,
    *,
    pool: PoolFilter = None,
    run: RunFilter = None,
    sort: Sort = SortKey.AGE,
    reverse: Reverse = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, max=3600, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Watch the pools, the queue and the episodes of running daemons.

    Without a terminal, and with --json, it prints the present state once.
    """
    options = Options(pool=pool, run=run, sort=sort, reverse=reverse)

    async def show() -> None:
        async with daemon.client() as client:
            if once or as_json or not out.is_terminal:
                facts = (await read_facts(client)).filtered(options)
                if as_json:
                    emit_json(facts.as_json())
                else:
                    out.print(render(facts, options=options, targets=daemon.envd))
            else:
                await Top(client, daemon.envd, options).run(interval_s)

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        # As with q: watching has no result that could be lost.
        if once or as_json:
            raise


async def read_facts(client: AsyncEnvClient) -> Facts:
    """Return the present state of the daemons. Raises: EnvError."""
    pools, episodes = await asyncio.gather(
        client.list_pools(queues=True, timeout=CALL_TIMEOUT), client.list_episodes(timeout=CALL_TIMEOUT)
    )
    return Facts(time=datetime.now(UTC), pools=pools, episodes=episodes)


class Top:
    """The screen and its keys. After a failed update it keeps the last facts, and says why they are old."""

    def __init__(self, client: AsyncEnvClient, targets: str, options: Options) -> None:
        self._client = client
        self._targets = targets
        self.options = options
        self._facts: Facts | None = None
        self._problem = ""
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self, interval_s: float) -> None:
        """Show the state until `q`. Raises: EnvError: the first update failed."""
        self._facts = await read_facts(self._client)
        with _keys(self), Live(console=out, screen=True, auto_refresh=False) as live:
            updating = asyncio.create_task(self._update(interval_s), name="top:update")
            try:
                while not self._ended.is_set():
                    live.update(self.screen(), refresh=True)
                    await self._changed.wait()
                    self._changed.clear()
            finally:
                updating.cancel()
                await asyncio.gather(updating, return_exceptions=True)

    def press(self, key: str) -> None:
        """Act on a key."""
        if key in {"q", "Q"}:
            self._ended.set()
        elif key == "s":
            keys = list(SortKey)
            self.options = replace(self.options, sort=keys[(keys.index(self.options.sort) + 1) % len(keys)])
        elif key == "r":
            self.options = replace(self.options, reverse=not self.options.reverse)
        self._changed.set()

    def screen(self) -> Group:
        """Return what the terminal shows now."""
        facts = (self._facts or Facts(time=datetime.now(UTC))).filtered(self.options)
        shown, left_out_count = fitted(facts, out)
        more = f"   {left_out_count} more episodes" if left_out_count else ""
        return render(shown, options=self.options, targets=self._targets, problem=self._problem, keys=_KEYS + more)

    async def _update(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                self._facts, self._problem = await read_facts(self._client), ""
            except EnvError as error:
                self._problem = f"{error.code}: {error}"
            self._changed.set()


@contextmanager
def _keys(screen: Top) -> Iterator[None]:
    """Pass the keys of the terminal to the screen; without a terminal on standard input, none."""
    if not sys.stdin.isatty():
        yield
        return
    loop, number = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    loop.add_reader(number, lambda: screen.press(os.read(number, 1).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
