"""The pages of the built-in suite and of the client are up to date."""

import pytest

from cuaenv import client
from tests.support.docs import ROOT, program

#: The synchronous twins, aliases of types, and settings of several event loops, which client.md explains.
_NOT_LISTED = {"Action", "Button", "EnvClient", "Episode", "HostState"}
_NOT_LISTED |= {"ClientSettings", "close_shared_clients", "shared_client"}


def test_the_table_of_the_suite_is_up_to_date() -> None:
    text = (ROOT / "docs" / "suite.md").read_text(encoding="utf-8")
    assert program("generate_suite").page(text) == text, "run `make docs`"


def test_the_reference_of_the_client_is_up_to_date() -> None:
    text = (ROOT / "docs" / "client-reference.md").read_text(encoding="utf-8")
    assert program("generate_client").page() == text, "run `make docs`"


@pytest.mark.parametrize("name", sorted({*client.__all__} - _NOT_LISTED))
def test_the_reference_of_the_client_lists_every_name(name: str) -> None:
    text = (ROOT / "docs" / "client-reference.md").read_text(encoding="utf-8")
    assert f"### {name}\n" in text or f"| `{name}" in text or f";`{name}` |" in text
