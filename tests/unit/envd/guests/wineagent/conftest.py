"""A guest agent for Wine without Wine: programs are shell scripts on drive C, a script plays the desktop's helper."""

import asyncio
import os
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from pydantic import JsonValue

from envd.base.channels import GuestChannels
from envd.desktop.agent import GuestAgent
from envd.guests.wineagent.commands import Commands
from envd.guests.wineagent.drive import Drive, Files
from envd.guests.wineagent.processes import Processes
from envd.guests.wineagent.scripts import Scripts
from envd.guests.wineagent.shell import Shell
from envd.hypervisor.agent_channel import AgentChannel

#: Runs the file that a Windows path names.
WINE = r"""#!/bin/sh
file=$(printf %s "$1" | sed 's/^[Cc]://; s/\\/\//g' | tr A-Z a-z)
shift
exec sh "$WINEPREFIX/drive_c$file" "$@"
"""
#: Answers each request with what the file `helper/WORD` holds, and writes its arguments to `helper/WORD.given`.
HELPER = r"""
import pathlib, sys
at = pathlib.Path(sys.argv[1])
print("ready null", flush=True)
for line in sys.stdin:
    word, *given = line.split()
    if word == "end":
        break
    texts = [bytes.fromhex(field.strip("-")).decode() for field in given]
    (at / f"{word}.given").write_text("\0".join(texts))
    answer = at / word
    print(answer.read_text() if answer.exists() else f"error no answer to {word}", flush=True)
"""


@dataclass
class World:
    """One agent and its host."""

    agent: GuestAgent
    drive: Drive
    shell: Shell
    scripts: Scripts
    commands: Commands
    helper: Path
    process: "subprocess.Popen[bytes]"

    def program(self, name: str, script: str) -> None:
        """Install a Windows program."""
        (self.drive.root / "windows" / "system32" / name).write_text(script)

    def helper_answers(self, word: str, text: str) -> None:
        """Set what the desktop's helper answers."""
        (self.helper / word).write_text(text)

    def helper_was_given(self, word: str) -> list[str]:
        """Return the arguments of the last request."""
        return (self.helper / f"{word}.given").read_text().split("\0")


class Channels:
    """The host's end of the agent's channel."""

    machine_id = "m-1"

    def __init__(self, channel: AgentChannel) -> None:
        self.channel = channel

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Pass a command on."""
        return await self.channel.command(command, arguments, timeout_s=timeout_s)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Serve the agent's protocol on a Unix socket, as QEMU does."""
    user = pwd.getpwuid(os.getuid()).pw_name
    drive = Drive(tmp_path / "prefix", user)
    for directory in ("windows/system32", f"users/{user}/Documents", "users/Public/Documents"):
        (drive.root / directory).mkdir(parents=True)
    (tmp_path / "wine64").write_text(WINE)
    (tmp_path / "wine64").chmod(0o755)
    helper = tmp_path / "helper"
    helper.mkdir()

    command = [sys.executable, "-S", "-c", HELPER, str(helper)]
    process = subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    shell = Shell(lambda: process)
    scripts = Scripts(drive, shell)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WINEPREFIX": str(drive.prefix)}
    commands = Commands(Files(drive), Processes(drive, scripts, environ))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                peer = listener.accept()[0]
            except OSError:
                return
            # The host closes the channel without waiting for the answer to a command that it gave up.
            with peer, suppress(BrokenPipeError, ConnectionResetError):
                commands.serve(peer.recv, peer.sendall)

    running = threading.Thread(target=shell.run_once)
    serving = threading.Thread(target=serve)
    running.start()
    serving.start()
    channel = AgentChannel(tmp_path / "agent.sock", machine_id="m-1")
    agent = GuestAgent(cast("GuestChannels", Channels(channel)))
    try:
        yield World(agent, drive, shell, scripts, commands, helper, process)
    finally:
        await channel.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        process.terminate()
        await asyncio.to_thread(running.join)
        await asyncio.to_thread(serving.join)
