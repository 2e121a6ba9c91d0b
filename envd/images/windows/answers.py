"""The answer file of Windows Setup: installation settings converted to `autounattend.xml`. Pure.

Components, passes and elements are those of Microsoft's "Unattended Windows Setup Reference". A test compares every
element with a table of published names.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lxml import etree

from envd.images.windows.editions import Edition

NAMESPACE = "urn:schemas-microsoft-com:unattend"
WCM_NAMESPACE = "http://schemas.microsoft.com/WMIConfig/2002/State"
#: Name of the answer file in the root of a removable medium, where Setup looks for it.
ANSWER_FILE = "autounattend.xml"
#: Directory of the answer disc with drivers, which Setup loads by itself.
SETUP_DRIVER_DIRECTORY = "$WinPEDriver$"
#: Directory of the answer disc with our scripts and files.
GUEST_DIRECTORY = "envd"
USER = "user"
COMPUTER = "windows"
#: Letters that Windows may give to the answer disc. They depend on the other drives.
_DISC_LETTERS = "CDEFGHIJ"
_EFI_MIB, _RESERVED_MIB = 200, 16


class Pass(StrEnum):
    """Configuration passes of Setup, in the order in which they run."""

    WINDOWS_PE = "windowsPE"
    OFFLINE_SERVICING = "offlineServicing"
    SPECIALIZE = "specialize"
    OOBE_SYSTEM = "oobeSystem"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSettings:
    """Settings of one installation."""

    edition: Edition
    language: str
    """Language tag, such as `en-US`."""
    keyboard: str
    """Language tag or identifier of the input locale, such as `en-US` or `0409:00000409`."""
    time_zone: str
    """Windows' own name, such as `W. Europe Standard Time`."""
    product_key: str
    """Empty for none."""
    screen_width_px: int
    screen_height_px: int


def answer_file(settings: InstallSettings, *, password: str) -> bytes:
    answers = _Answers()
    _setup(answers, settings)
    _locale(answers.component(Pass.OOBE_SYSTEM, "Microsoft-Windows-International-Core"), settings)
    # With elevation prompts on a separate desktop, an agent would see a black screen.
    answers.component(Pass.OFFLINE_SERVICING, "Microsoft-Windows-LUA-Settings").set("EnableLUA", "false")
    _specialize(answers, settings)
    _first_logon(answers, settings, password)
    return answers.xml()


def disc_command(script: str) -> str:
    """Return a command that runs a script of the answer disc, whatever its drive letter, and then succeeds."""
    path = f"%d:\\{GUEST_DIRECTORY}\\{script}"
    # Without the outer parentheses, `exit` would belong to the loop's body.
    return f'cmd.exe /d /c "(for %d in ({" ".join(_DISC_LETTERS)}) do @if exist {path} call {path}) & exit 0"'


class _Element:
    """An element of a component, with setters by path."""

    def __init__(self, element: etree._Element) -> None:
        self._element = element

    def set(self, path: str, value: str) -> None:
        self._descendant(path.split("/")).text = value

    def add(self, path: str) -> "_Element":
        """Append an item to a list; the last part of the path is the item's name."""
        *parents, name = path.split("/")
        parent = self._descendant(parents)
        item = etree.SubElement(parent, f"{{{NAMESPACE}}}{name}", {f"{{{WCM_NAMESPACE}}}action": "add"})
        return _Element(item)

    def _descendant(self, names: Sequence[str]) -> etree._Element:
        element = self._element
        for name in names:
            found = element.find(f"{{{NAMESPACE}}}{name}")
            element = etree.SubElement(element, f"{{{NAMESPACE}}}{name}") if found is None else found
        return element

    def key(self, value: str) -> None:
        self._element.set(f"{{{WCM_NAMESPACE}}}keyValue", value)


class _Answers:
    """An answer file that is being written."""

    def __init__(self) -> None:
        namespaces: dict[str | None, str] = {None: NAMESPACE, "wcm": WCM_NAMESPACE}
        # lxml allows None, for the default namespace; its stubs do not.
        self._root = etree.Element(f"{{{NAMESPACE}}}unattend", nsmap=namespaces)  # type: ignore[arg-type]
        self._settings = {
            name: etree.SubElement(self._root, f"{{{NAMESPACE}}}settings", {"pass": name.value}) for name in Pass
        }

    def component(self, in_pass: Pass, name: str) -> _Element:
        return _Element(
            etree.SubElement(
                self._settings[in_pass],
                f"{{{NAMESPACE}}}component",
                {
                    "name": name,
                    "processorArchitecture": "amd64",
                    "publicKeyToken": "31bf3856ad364e35",
                    "language": "neutral",
                    "versionScope": "nonSxS",
                },
            )
        )

    def xml(self) -> bytes:
        return etree.tostring(self._root, xml_declaration=True, encoding="utf-8", pretty_print=True)


def _locale(component: _Element, settings: InstallSettings) -> None:
    component.set("InputLocale", settings.keyboard)
    component.set("SystemLocale", settings.language)
    component.set("UILanguage", settings.language)
    component.set("UserLocale", settings.language)


def _setup(answers: _Answers, settings: InstallSettings) -> None:
    locale = answers.component(Pass.WINDOWS_PE, "Microsoft-Windows-International-Core-WinPE")
    locale.set("SetupUILanguage/UILanguage", settings.language)
    _locale(locale, settings)

    drivers = answers.component(Pass.WINDOWS_PE, "Microsoft-Windows-PnpCustomizationsWinPE")
    for number, letter in enumerate(_DISC_LETTERS, start=1):
        item = drivers.add("DriverPaths/PathAndCredentials")
        item.key(str(number))
        item.set("Path", f"{letter}:\\{SETUP_DRIVER_DIRECTORY}")

    setup = answers.component(Pass.WINDOWS_PE, "Microsoft-Windows-Setup")
    setup.set("Diagnostics/OptIn", "false")
    setup.set("DynamicUpdate/Enable", "false")
    setup.set("DynamicUpdate/WillShowUI", "Never")
    # The machine has what Windows 11 asks for, except secure boot and, if configured so, memory.
    lab_config = r"reg.exe add HKLM\SYSTEM\Setup\LabConfig /v {} /t REG_DWORD /d 1 /f"
    checks = ("BypassTPMCheck", "BypassSecureBootCheck", "BypassRAMCheck", "BypassCPUCheck", "BypassStorageCheck")
    _commands(setup, [*(lab_config.format(check) for check in checks), disc_command("setup.cmd")])
    disk = setup.add("DiskConfiguration/Disk")
    disk.set("DiskID", "0")
    disk.set("WillWipeDisk", "true")
    _partitions(disk)
    setup.set("DiskConfiguration/WillShowUI", "OnError")
    image = setup.add("ImageInstall/OSImage/InstallFrom/MetaData")
    image.set("Key", "/IMAGE/NAME")
    image.set("Value", settings.edition.name)
    setup.set("ImageInstall/OSImage/InstallTo/DiskID", "0")
    setup.set("ImageInstall/OSImage/InstallTo/PartitionID", "3")
    setup.set("ImageInstall/OSImage/WillShowUI", "OnError")
    setup.set("UserData/AcceptEula", "true")
    setup.set("UserData/FullName", USER)
    if settings.product_key:
        setup.set("UserData/ProductKey/Key", settings.product_key)
        setup.set("UserData/ProductKey/WillShowUI", "OnError")


def _partitions(disk: _Element) -> None:
    """Add the EFI system partition, the reserved one and Windows' own."""
    for order, (kind, size_mib) in enumerate((("EFI", _EFI_MIB), ("MSR", _RESERVED_MIB), ("Primary", 0)), start=1):
        partition = disk.add("CreatePartitions/CreatePartition")
        partition.set("Order", str(order))
        partition.set("Type", kind)
        partition.set(*(("Size", str(size_mib)) if size_mib else ("Extend", "true")))
    for order, (number, file_system, label) in enumerate(((1, "FAT32", "System"), (3, "NTFS", "Windows")), start=1):
        partition = disk.add("ModifyPartitions/ModifyPartition")
        partition.set("Order", str(order))
        partition.set("PartitionID", str(number))
        partition.set("Format", file_system)
        partition.set("Label", label)
        if file_system == "NTFS":
            partition.set("Letter", "C")


def _specialize(answers: _Answers, settings: InstallSettings) -> None:
    shell = answers.component(Pass.SPECIALIZE, "Microsoft-Windows-Shell-Setup")
    shell.set("ComputerName", COMPUTER)
    shell.set("TimeZone", settings.time_zone)
    activation = answers.component(Pass.SPECIALIZE, "Microsoft-Windows-Security-SPP-UX")
    activation.set("SkipAutoActivation", "true")
    answers.component(Pass.SPECIALIZE, "Microsoft-Windows-ErrorReportingCore").set("DisableWER", "1")
    answers.component(Pass.SPECIALIZE, "Microsoft-Windows-SQMApi").set("CEIPEnabled", "0")
    answers.component(Pass.SPECIALIZE, "Microsoft-Windows-SystemRestore-Main").set("DisableSR", "1")
    # Windows 11 encrypts its disk if it finds a TPM. Forks of an encrypted disk would depend on the TPM's state.
    encryption = answers.component(Pass.SPECIALIZE, "Microsoft-Windows-SecureStartup-FilterDriver")
    encryption.set("PreventDeviceEncryption", "true")
    _commands(
        answers.component(Pass.SPECIALIZE, "Microsoft-Windows-Deployment"),
        [
            # Without a network the first start would otherwise wait for one.
            r"reg.exe add HKLM\SOFTWARE\Microsoft\Windows\CurrentVersion\OOBE /v BypassNRO /t REG_DWORD /d 1 /f",
            disc_command("specialize.cmd"),
        ],
    )


def _commands(component: _Element, commands: Sequence[str]) -> None:
    for order, command in enumerate(commands, start=1):
        item = component.add("RunSynchronous/RunSynchronousCommand")
        item.set("Order", str(order))
        item.set("Path", command)


def _first_logon(answers: _Answers, settings: InstallSettings, password: str) -> None:
    encryption = answers.component(Pass.OOBE_SYSTEM, "Microsoft-Windows-SecureStartup-FilterDriver")
    encryption.set("PreventDeviceEncryption", "true")
    shell = answers.component(Pass.OOBE_SYSTEM, "Microsoft-Windows-Shell-Setup")
    for name in (
        "HideEULAPage",
        "HideLocalAccountScreen",
        "HideOEMRegistrationScreen",
        "HideOnlineAccountScreens",
        "HideWirelessSetupInOOBE",
    ):
        shell.set(f"OOBE/{name}", "true")
    shell.set("OOBE/ProtectYourPC", "3")
    account = shell.add("UserAccounts/LocalAccounts/LocalAccount")
    account.set("Name", USER)
    account.set("Group", "Administrators")
    _password(account, "Password", password)
    if settings.edition.release.is_server:
        _password(shell, "UserAccounts/AdministratorPassword", password)
    shell.set("AutoLogon/Enabled", "true")
    shell.set("AutoLogon/Username", USER)
    # The count falls with each logon. `first-logon.ps1` removes the limit.
    shell.set("AutoLogon/LogonCount", "65432")
    _password(shell, "AutoLogon/Password", password)
    shell.set("Display/HorizontalResolution", str(settings.screen_width_px))
    shell.set("Display/VerticalResolution", str(settings.screen_height_px))
    shell.set("Display/ColorDepth", "32")
    command = shell.add("FirstLogonCommands/SynchronousCommand")
    command.set("Order", "1")
    command.set("CommandLine", disc_command("first-logon.cmd"))


def _password(element: _Element, path: str, password: str) -> None:
    """Set a password in the form of Windows System Image Manager: obscured, not encrypted."""
    suffix = path.rpartition("/")[2]
    element.set(f"{path}/Value", b64encode((password + suffix).encode("utf-16-le")).decode())
    element.set(f"{path}/PlainText", "false")
