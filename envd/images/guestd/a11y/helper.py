"""The helper process, started as `python3 -m guestd.a11y.helper`.

It answers queries, one line of JSON each, from stdin. Each query runs in a fork, so that it sees the current
applications and a hung application does not block the next query. The parent has AT-SPI loaded and never uses it.

An answer is a line of JSON, `{ok, length}`, followed by `length` bytes: the result or the error text.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import IO, Any

from .tree import TreeBuilder, serialize, terminal_text


def import_atspi() -> Any:
    """Load the AT-SPI library, which takes seconds in an emulated guest. Raises: ImportError, ValueError."""
    import gi  # noqa: PLC0415 - optional: only the tree needs it

    gi.require_version("Atspi", "2.0")
    from gi.repository import Atspi  # noqa: PLC0415

    return Atspi


def run_query(query: Mapping[str, Any]) -> bytes:
    """Return the tree as XML, or the terminal's text as JSON. Raises: ImportError, ValueError: AT-SPI is missing."""
    atspi = import_atspi()
    is_terminal = query["what"] == "terminal"
    builder = TreeBuilder(
        atspi,
        max_nodes=query["max_nodes"],
        deadline_s=time.monotonic() + query["timeout_s"],
        only=frozenset({"frame", "terminal"}) if is_terminal else frozenset(),
        showing=query["showing"] and not is_terminal,
    )
    # The registry may have to be started first and then answers late. A hung application must not take all the time.
    atspi.set_timeout(8000, 8000)
    desktop = atspi.get_desktop(0)
    desktop.get_child_count()
    atspi.set_timeout(1500, 3000)
    tree = builder.build(desktop)
    return json.dumps(terminal_text(tree)).encode() if is_terminal else serialize(tree)


def _run_child(line: bytes, descriptor: int) -> None:
    """Run one query in a fork, write its result to a pipe, and exit."""
    ok, data = True, b""
    try:
        data = run_query(json.loads(line))
    except (ImportError, ValueError) as error:
        message = f"AT-SPI is missing in this guest ({error}); install python3-gi and gir1.2-atspi-2.0"
        ok, data = False, message.encode()
    except Exception as error:
        ok, data = False, f"{type(error).__name__}: {error}".encode()
    with open(descriptor, "wb") as pipe:
        pipe.write(data)
    os._exit(0 if ok else 1)


def serve(queries: Iterable[bytes], answers: IO[bytes]) -> None:
    """Answer queries until their stream ends."""
    with suppress(ImportError, ValueError):
        import_atspi()
    for line in queries:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run_child(line, writing)
        os.close(writing)
        with open(reading, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(child, 0)
        answers.write(json.dumps({"ok": status == 0, "length": len(data)}).encode() + b"\n" + data)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
