"""The FastAPI application, for `uvicorn trainer.adapters.openenv.server.app:app`.

Variables configure it: `ENVD_TARGET`, `ENVD_TOKEN`, `ENVD_TLS_CA` (a file), `ENVD_POOL`, `ENVD_TASK` (of a reset that
names none) and `ENVD_MAX_SESSIONS` (16).
"""

import argparse
import functools
import os
from collections.abc import Mapping
from pathlib import Path

from fastapi import FastAPI
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.types import ConcurrencyConfig

from trainer.adapters.openenv.models import DesktopAction, DesktopObservation
from trainer.adapters.openenv.server.environment import DesktopEnvironment
from trainer.adapters.session import SessionSettings

#: A session of a client that went away without closing its connection is closed after this time.
_IDLE_S = 1800.0


def make_app(environ: Mapping[str, str] = os.environ) -> FastAPI:
    """Return the application. Raises: ValueError: A variable is malformed."""
    ca = environ.get("ENVD_TLS_CA")
    settings = SessionSettings.connect(
        environ.get("ENVD_TARGET", ""),
        run="openenv",
        token=environ.get("ENVD_TOKEN"),
        tls_ca=Path(ca) if ca else None,
        pool=environ.get("ENVD_POOL", ""),
    )
    count = environ.get("ENVD_MAX_SESSIONS", "16")
    if not count.isdigit():
        raise ValueError(f"ENVD_MAX_SESSIONS is {count}; it must be a number of sessions")
    return create_app(
        functools.partial(DesktopEnvironment, settings, task=environ.get("ENVD_TASK", "")),
        DesktopAction,
        DesktopObservation,
        env_name="envd_desktop",
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=int(count), session_timeout=_IDLE_S),
    )


app = make_app()


def main() -> None:
    import uvicorn  # noqa: PLC0415 -- not needed by other servers

    parser = argparse.ArgumentParser(description="Serve desktops as an OpenEnv environment.")
    parser.add_argument("--host", default="127.0.0.1", help="Other hosts can act on desktops if this is not loopback.")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
