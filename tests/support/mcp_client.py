"""Clients of MCP servers. They import `mcp` when they are used: it takes 0.8 s, and each process collects all tests."""

from typing import TYPE_CHECKING, Any

from trainer.adapters.session import SessionSettings

if TYPE_CHECKING:
    from mcp.client import Client


def mcp_client(server: Any) -> "Client":
    """Return a client of a server: a transport, an address, or the server itself."""
    from mcp.client import Client

    return Client(server)


def client_of(settings: SessionSettings, *, task: str = "") -> "Client":
    """Return a client of a server of desktops in this process."""
    from trainer.adapters.mcp import make_server

    return mcp_client(make_server(settings, task=task))
