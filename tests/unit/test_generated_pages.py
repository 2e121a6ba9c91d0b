"""Generated pages of the documentation are up to date, and the contract names every reason of an error."""

import inspect

import pytest

from cuaenv import client
from envd.base import errors
from tests.support.docs import ROOT, program

#: The synchronous twins, aliases of types, and settings of several event loops, which client.md explains.
_NOT_LISTED = {"Action", "Button", "EnvClient", "Episode", "HostState"}
_NOT_LISTED |= {"ClientSettings", "close_shared_clients", "shared_client"}


@pytest.mark.parametrize("name", ["api", "client-reference", "suite"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    page = program(f"generate_{name.partition('-')[0]}").page
    assert (page(text) if name == "suite" else page()) == text, "run `make docs`"


def test_the_reference_of_the_client_lists_every_name() -> None:
    text = (ROOT / "docs" / "client-reference.md").read_text(encoding="utf-8")
    forms = ("### {}\n", "| `{}", ";`{}` |")
    names = {*client.__all__} - _NOT_LISTED
    assert [name for name in sorted(names) if not any(form.format(name) in text for form in forms)] == []


def test_every_reason_that_a_client_can_receive_is_in_the_contract() -> None:
    source = (ROOT / "proto" / "cuaenv" / "v1" / "env.proto").read_text(encoding="utf-8")
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EnvdError)]
    # An unknown image is an error at startup; no method takes an image.
    reasons = {kind.reason for kind in kinds if kind is not errors.ImageNotFound}
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in source] == []
