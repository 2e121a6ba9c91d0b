"""Generated text is complete, and its links lead to headings. The contract names every reason of an error."""

import inspect
import re

import pytest

from cuaenv import client
from envd.base import errors
from envd.base.config_sources import fields
from envd.tasks.catalogue import TaskCatalogue
from tests.support.docs import ROOT, program

#: The synchronous twins, aliases of types, and settings of several event loops, which client.md explains.
_NOT_LISTED = {"Action", "Button", "EnvClient", "Episode", "HostState"}
_NOT_LISTED |= {"ClientSettings", "close_shared_clients", "shared_client"}


@pytest.fixture(scope="module")
def complete() -> dict[str, str]:
    """The pages with a place for generated text, by name."""
    generate = program("generate")
    return {page.stem: generate.complete(page.read_text(encoding="utf-8")) for page in generate.pages()}


def test_every_page_with_a_place_gets_its_text(complete: dict[str, str]) -> None:
    assert complete.keys() == {"api", "client-reference", "monitoring", "proofs", "settings", "suite"}
    for name, text in complete.items():
        committed = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert "<!-- generated" not in text
        assert "`out/docs/" in committed
        assert len(text) > len(committed)


def test_links_within_generated_pages_lead_to_headings_and_files(complete: dict[str, str]) -> None:
    broken = []
    for name, page in complete.items():
        text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if not re.match(r"[a-z]+:", target) and not (
                (ROOT / "docs" / file).is_file() if file else anchor in anchors
            ):
                broken.append((name, target))
    assert broken == []


def test_the_table_of_settings_has_every_setting_with_its_default_and_meaning(complete: dict[str, str]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| *([^|]*?) *\| (.+) \|$", complete["settings"], re.MULTILINE)
    assert [key for key, _, _ in rows] == [key.replace("NAME", "*") for key in fields()]
    defaults = {key: default for key, default, _ in rows}
    assert defaults["listen"] == "`127.0.0.1:50051`"
    assert defaults["pools.*.settle.quiet_ms"] == "`300`"
    assert defaults["pools.*.always_running"] == "`false`"
    assert defaults["tasks.suites"] == "`[]`"
    assert [key for key, _, meaning in rows if not meaning.endswith(".")] == []


def test_the_table_of_the_suite_has_every_task(complete: dict[str, str]) -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", complete["suite"], re.MULTILINE)
    assert sorted(listed) == sorted(task.task_id.partition("/")[2] for task in TaskCatalogue.load().list())


def test_the_reference_of_the_client_lists_every_name(complete: dict[str, str]) -> None:
    forms = ("### {}\n", "| `{}", ";`{}` |")
    names = {*client.__all__} - _NOT_LISTED
    listed = complete["client-reference"]
    assert [name for name in sorted(names) if not any(form.format(name) in listed for form in forms)] == []


def test_the_contract_and_the_page_of_the_api_name_every_reason_that_a_client_can_receive(
    complete: dict[str, str],
) -> None:
    source = (ROOT / "proto" / "cuaenv" / "v1" / "env.proto").read_text(encoding="utf-8")
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EnvdError)]
    # An unknown image is an error at startup; no method takes an image.
    reasons = {kind.reason for kind in kinds if kind is not errors.ImageNotFound}
    for text in (source, complete["api"]):
        assert [reason for reason in sorted(reasons) if f"`{reason}`" not in text] == []
