"""Commands of the fake guest's agent."""

from typing import Any

from tests.support.faulty import FaultyMachine


async def ask(machine: FaultyMachine, command: str, **arguments: Any) -> Any:
    """Return the agent's response to a command."""
    arguments = {name.replace("_", "-"): value for name, value in arguments.items()}
    return await machine.agent_command(command, arguments, timeout_s=60.0)
