"""Answers to the host's PowerShell scripts, by the name in their first line: `# envd: NAME`.

Each prints what the script prints on Windows. The lines after the first assign the values, `$variable = 'value'`.
"""

import inspect
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .accessibility import tree
from .drive import AgentError, Drive
from .shell import Shell

NO_DIRECTORY = 66
_NAME = re.compile(r"# envd: ([a-z-]+)\n")
#: PowerShell takes five characters for the single quote; a value has each doubled.
_VALUE = re.compile(r"\$(\w+) = '((?:[^'‘’‚‛]|(['‘’‚‛])\3)*)'\n")


class Output(NamedTuple):
    """What a script printed, and how it ended."""

    stdout: bytes = b""
    exit_code: int = 0
    stderr: bytes = b""


class Scripts:
    """The scripts that this guest answers."""

    def __init__(self, drive: Drive, shell: Shell) -> None:
        self._drive = drive
        self._shell = shell
        self.by_name: Mapping[str, Callable[..., Output]] = {
            "probe": self._probe,
            "list-directory": self._list_directory,
            "list-processes": self._list_processes,
            "query-registry": self._query_registry,
            "make-directory": self._make_directory,
            "make-parent": self._make_parent,
            "remove": self._remove,
            "list-windows": self._list_windows,
            "type-text": self._type_text,
            "accessibility-tree": self._accessibility_tree,
        }

    def run(self, arguments: Sequence[str]) -> Output:
        """Answer `powershell.exe`; never raises. Any script but the host's own fails."""
        script = arguments[-1] if arguments else ""
        name = _NAME.match(script)
        if name is None or name[1] not in self.by_name:
            return Output(b"", 1, b"this guest has no PowerShell; it only answers the scripts of its host")
        function = self.by_name[name[1]]
        try:
            values, at = {}, name.end()
            while found := _VALUE.match(script, at):
                values[found[1]] = re.sub(r"(['‘’‚‛])\1", r"\1", found[2])
                at = found.end()
            return function(**{given: values[given] for given in inspect.signature(function).parameters})
        except KeyError as error:
            return Output(b"", 1, f"{name[1]}: ${error.args[0]} has no value".encode())
        except (OSError, AgentError) as error:
            return Output(b"", 1, f"{name[1]}: {error}".encode())

    # Files

    def _probe(self, path: str) -> Output:
        file = self._drive.path(path)
        if file.is_file():
            return Output(f"{file.stat().st_size}\r\n".encode())
        return Output(b"other\r\n" if file.exists() or file.is_symlink() else b"absent\r\n")

    def _list_directory(self, path: str) -> Output:
        directory = self._drive.path(path)
        if not directory.is_dir():
            return Output(exit_code=NO_DIRECTORY)
        return Output("".join(f"{'d' if at.is_dir() else 'f'}{at.name}\0" for at in directory.iterdir()).encode())

    def _make_directory(self, path: str) -> Output:
        self._drive.make_directories(self._drive.path(path))
        return Output()

    def _make_parent(self, path: str) -> Output:
        self._drive.make_directories(self._drive.path(path).parent)
        return Output()

    def _remove(self, path: str) -> Output:
        file = self._drive.path(path)
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
        return Output()

    # The session

    def _list_processes(self) -> Output:
        names = self._ask("processes")
        return Output("".join(f"R {_without_exe(name)}\r\n" for name in names).encode())

    def _query_registry(self, hive: str, key: str, name: str) -> Output:
        return Output(json.dumps(self._ask("registry", hive, key, name)).encode())

    def _list_windows(self) -> Output:
        lines = []
        for window in reversed(self._windows()["windows"]):
            title, kind = (" ".join(window[field].split()) for field in ("text", "class"))
            if title:
                kind = f"{_without_exe(window['program'])}.{kind}".replace(" ", "_")
                lines.append(f"0x{window['id']:08x} 0 {kind} - {title}\r\n")
        return Output("".join(lines).encode())

    def _type_text(self, text: str) -> Output:
        self._ask("type", text)
        return Output()

    def _accessibility_tree(self, limit: str) -> Output:
        return Output(tree(self._windows(), limit=int(limit)))

    def _windows(self) -> Any:
        found = self._ask("windows")
        found["windows"] = [window for window in found["windows"] if window is not None]
        return found

    def _ask(self, word: str, *arguments: str) -> Any:
        return self._shell.ask(word, *arguments)


def _without_exe(name: str) -> str:
    return re.sub(r"\.exe$", "", name, flags=re.IGNORECASE)
