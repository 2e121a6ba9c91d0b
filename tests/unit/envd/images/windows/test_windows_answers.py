"""The answer file: published names only, and the values that a build asks for."""

import difflib
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lxml import etree

from envd.images.windows.media import Edition
from envd.images.windows.plan import WindowsOptions, answer_file

WCM_NAMESPACE = "http://schemas.microsoft.com/WMIConfig/2002/State"
CLIENT = Edition(
    index=1,
    name="Windows 11 Enterprise Evaluation",
    edition_id="EnterpriseEval",
    architecture="x64",
    build=26200,
    installation_type="Client",
    languages=("en-US",),
    default_language="en-US",
    size_bytes=20 << 30,
)
SERVER = replace(
    CLIENT, name="Windows Server 2025 SERVERSTANDARD", edition_id="ServerStandard", build=26100,
    installation_type="Server",
)  # fmt: skip
OPTIONS = WindowsOptions(
    iso=Path("windows.iso"),
    virtio_win=Path("virtio-win.iso"),
    language="en-US",
    keyboard="0409:00000409",
    time_zone="W. Europe Standard Time",
    screen_width_px=1366,
    screen_height_px=768,
)
BOTH = ((OPTIONS, CLIENT), (replace(OPTIONS, product_key="AAAAA-BBBBB-CCCCC-DDDDD-EEEEE"), SERVER))
PASSWORD = "p<ss&wörd"  # noqa: S105
#: Longest command in the passes windowsPE and specialize, and at the first logon.
MAX_PATH_CHARS, MAX_COMMAND_LINE_CHARS = 259, 1024

#: Lines of the file for the server that are not in the client's.
SERVER_DIFFERENCES = [
    "- <Value>Windows 11 Enterprise Evaluation</Value>",
    "+ <Value>Windows Server 2025 SERVERSTANDARD</Value>",
    "+ <ProductKey>",
    "+ <Key>AAAAA-BBBBB-CCCCC-DDDDD-EEEEE</Key>",
    "+ <WillShowUI>OnError</WillShowUI>",
    "+ </ProductKey>",
    "+ <AdministratorPassword>",
    "+ <Value>cAA8AHMAcwAmAHcA9gByAGQAQQBkAG0AaQBuAGkAcwB0AHIAYQB0AG8AcgBQAGEAcwBzAHcAbwByAGQA</Value>",
    "+ <PlainText>false</PlainText>",
    "+ </AdministratorPassword>",
]

Published = dict[str, tuple[set[str], set[str]]]


@pytest.fixture(scope="module")
def published() -> Published:
    """Return {component: (passes, elements)}."""
    found: Published = {}
    name = ""
    for line in (Path(__file__).parent / "unattend_elements.txt").read_text().splitlines():
        words = line.partition("#")[0].split()
        if words and not line.startswith(" "):
            name = words[0]
            found[name] = (set(), set())
        elif words and words[0] == "passes":
            found[name][0].update(words[1:])
        elif words:
            found[name][1].add(words[0])
    return found


def parsed(options: WindowsOptions = OPTIONS, edition: Edition = CLIENT) -> etree._Element:
    return etree.fromstring(answer_file(options, edition, password=PASSWORD))


def leaves(element: etree._Element, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the elements without children; list items have [] after their name."""
    for child in element:
        item = "[]" if child.get(f"{{{WCM_NAMESPACE}}}action") == "add" else ""
        name = f"{path}{etree.QName(child).localname}{item}"
        if len(child):
            yield from leaves(child, f"{name}/")
        else:
            yield name, child.text or ""


def settings_of(root: etree._Element) -> Iterator[tuple[str, str, str, str]]:
    """Yield (pass, component, path, text) of every setting."""
    for settings in root:
        for component in settings:
            for path, text in leaves(component):
                yield str(settings.get("pass")), str(component.get("name")), path, text


def values(root: etree._Element, component: str, path: str) -> list[str]:
    return [text for _, name, found, text in settings_of(root) if (name, found) == (component, path)]


@pytest.mark.parametrize(("options", "edition"), BOTH, ids=["client", "server"])
def test_every_setting_is_published_for_its_pass(
    options: WindowsOptions, edition: Edition, published: Published
) -> None:
    found = list(settings_of(parsed(options, edition)))
    assert len(found) > 60
    for in_pass, component, path, _ in found:
        assert in_pass in published[component][0], (component, in_pass)
        assert path in published[component][1], (component, path)


def test_the_table_has_no_setting_that_is_never_used(published: Published) -> None:
    used = {(name, path) for each in BOTH for _, name, path, _ in settings_of(parsed(*each))}
    assert used == {(name, path) for name, (_, paths) in published.items() for path in paths}


def test_a_misspelt_setting_is_not_in_the_table(published: Published) -> None:
    assert "DiskConfiguration/Disk[]/WillWipeDisc" not in published["Microsoft-Windows-Setup"][1]
    assert "oobeSystem" not in published["Microsoft-Windows-Setup"][0]


def test_the_user_is_logged_on_with_the_password_and_servers_have_one_for_the_administrator() -> None:
    shell = "Microsoft-Windows-Shell-Setup"
    for both, administrator in zip(BOTH, ([], [PASSWORD + "AdministratorPassword"]), strict=True):
        root = parsed(*both)

        def decoded(path: str, root: etree._Element = root) -> list[str]:
            return [b64decode(text).decode("utf-16-le") for text in values(root, shell, path)]

        assert decoded("AutoLogon/Password/Value") == [PASSWORD + "Password"]
        assert decoded("UserAccounts/LocalAccounts/LocalAccount[]/Password/Value") == [PASSWORD + "Password"]
        assert decoded("UserAccounts/AdministratorPassword/Value") == administrator
        names = values(root, shell, "UserAccounts/LocalAccounts/LocalAccount[]/Name")
        assert names == values(root, shell, "AutoLogon/Username")


def test_values_are_text_and_not_markup() -> None:
    options, edition = replace(OPTIONS, time_zone="<Here> & $there"), replace(CLIENT, name="Windows 11 <Pro> & more")
    root = parsed(options, edition)
    assert values(root, "Microsoft-Windows-Shell-Setup", "TimeZone") == [options.time_zone]
    path = "ImageInstall/OSImage/InstallFrom/MetaData[]/Value"
    assert values(root, "Microsoft-Windows-Setup", path) == [edition.name]


def test_commands_fit_their_elements_and_find_the_disc_by_any_letter() -> None:
    paths = [text for _, _, path, text in settings_of(parsed()) if path.endswith("Command[]/Path")]
    assert max(map(len, paths)) <= MAX_PATH_CHARS
    [logon] = values(parsed(), "Microsoft-Windows-Shell-Setup", "FirstLogonCommands/SynchronousCommand[]/CommandLine")
    assert len(logon) <= MAX_COMMAND_LINE_CHARS
    setup, specialize = (path for path in paths if path.startswith("cmd.exe"))
    assert setup == (
        'cmd.exe /d /c "(for %d in (C D E F G H I J) do @if exist %d:\\envd\\setup.cmd call %d:\\envd\\setup.cmd)'
        ' & exit 0"'
    )
    assert (specialize, logon) == (setup.replace("setup", "specialize"), setup.replace("setup", "first-logon"))


def test_the_files_are_byte_for_byte_the_recorded_ones() -> None:
    client, server = (answer_file(*each, password=PASSWORD).decode() for each in BOTH)
    assert client.encode() == (Path(__file__).parent / "client.xml").read_bytes()
    differences = difflib.unified_diff(client.splitlines(), server.splitlines(), lineterm="", n=0)
    changed = [line for line in differences if not line.startswith(("---", "+++", "@@"))]
    assert [f"{line[0]} {line[1:].strip()}" for line in changed] == SERVER_DIFFERENCES
