"""The programs of a fake guest: the few that setups, checkers and clients run, over files in memory.

Each does what its namesake does with the options that it knows, and fails as its namesake fails with a wrong usage
on others. A program ends at once; `duration_s` says how long the real one would have run.
"""

import hashlib
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from envd.hypervisor.fake.clock import GuestClock
from envd.hypervisor.fake.files import HOME, GuestFiles
from envd.hypervisor.fake.shell import Ran, run_script


class OpenWindow(NamedTuple):
    """A window as the window manager lists it."""

    window_id: int
    wm_class: str
    """`instance.Class`."""
    title: str


class WindowManager(Protocol):
    """Whom `wmctrl` and `ps` ask."""

    def list_windows(self) -> list[OpenWindow]:
        """Open windows, the active one last."""

    def activate_window(self, title: str) -> bool:
        """Raise a window by title or id (`0x...`)."""

    def close_window(self, title: str) -> bool:
        """Close a window by title or id (`0x...`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program did, and how long it ran."""

    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    duration_s: float = 0.0


class Programs:
    """Runs programs in one guest."""

    def __init__(
        self, files: GuestFiles, *, windows: Callable[[], WindowManager | None], clock: GuestClock | None = None
    ) -> None:
        self._files = files
        self._windows = windows
        self._clock = clock or GuestClock()
        self._clipboard = b""
        self._programs: dict[str, Callable[[list[str], bytes], Outcome]] = {
            "[": self._bracket,
            "cat": self._cat,
            "chmod": _succeed,
            "chown": _succeed,
            "date": self._date,
            "echo": _echo,
            "false": lambda *_: Outcome(exit_code=1),
            "find": self._find,
            "ls": self._ls,
            "mkdir": self._mkdir,
            "mv": self._mv,
            "printf": _printf,
            "ps": self._ps,
            "rm": self._rm,
            "sha256sum": self._sha256sum,
            "sleep": _sleep,
            "stat": self._stat,
            "sync": _succeed,
            "tee": self._tee,
            "test": self._test,
            "touch": self._touch,
            "true": _succeed,
            "wmctrl": self._wmctrl,
            "xclip": self._xclip,
        }

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Outcome:
        """Run a program to its end.

        Raises:
            FileNotFoundError: The guest has no such program.
        """
        name, arguments = posixpath.basename(argv[0]), list(argv[1:])
        if name == "env":
            return Outcome(stdout="".join(f"{key}={value}\n" for key, value in (env or {}).items()).encode())
        if name in ("sh", "bash"):
            return self._sh(arguments, stdin, env or {})
        if name not in self._programs:
            raise FileNotFoundError(argv[0])
        return self._programs[name](arguments, stdin)

    def _sh(self, arguments: list[str], stdin: bytes, env: Mapping[str, str]) -> Outcome:
        match arguments:
            case ["-c", script, *rest]:
                parameters = rest
            case [path] if path in self._files:
                script, parameters = self._files[path].decode(), [path]
            case _:
                return Outcome(exit_code=127, stderr=b"sh: only -c SCRIPT and FILE are known\n")
        duration_s = 0.0

        def run(argv: list[str]) -> Ran:
            nonlocal duration_s
            try:
                outcome = self.run(argv, stdin=stdin, env=env)
            except FileNotFoundError:
                return Ran(127, b"", f"sh: 1: {argv[0]}: not found\n".encode())
            duration_s += outcome.duration_s
            return Ran(outcome.exit_code, outcome.stdout, outcome.stderr)

        variables = {**env, **{str(number): value for number, value in enumerate(parameters)}}
        ran = run_script(script, variables=variables, run=run, files=self._files)
        return Outcome(exit_code=ran.exit_code, stdout=ran.stdout, stderr=ran.stderr, duration_s=duration_s)

    # Files

    def _cat(self, arguments: list[str], stdin: bytes) -> Outcome:
        paths = _operands(arguments)
        missing = [path for path in paths if path not in self._files]
        return Outcome(
            exit_code=1 if missing else 0,
            stdout=b"".join(self._files.get(path, b"") for path in paths) if paths else stdin,
            stderr="".join(f"cat: {path}: No such file or directory\n" for path in missing).encode(),
        )

    def _find(self, arguments: list[str], _stdin: bytes) -> Outcome:
        match arguments:
            case [path, "-mindepth", "1", "-maxdepth", "1", "-printf", form]:
                template = form.replace("\\0", "\0").replace("\\n", "\n")
                kinds = {
                    name: "d" if self._files.is_directory(posixpath.join(path, name)) else "f"
                    for name in self._files.list_directory(path)
                }
                rows = [template.replace("%y", kind).replace("%f", name) for name, kind in kinds.items()]
                return Outcome(stdout="".join(rows).encode())
            case _:
                return Outcome(exit_code=1, stderr=b"find: only -mindepth 1 -maxdepth 1 -printf FORMAT is known\n")

    def _ls(self, arguments: list[str], _stdin: bytes) -> Outcome:
        path = (_operands(arguments) or [HOME])[0]
        if path in self._files:
            return Outcome(stdout=f"{path}\n".encode())
        if not self._files.is_directory(path):
            return Outcome(exit_code=2, stderr=f"ls: cannot access '{path}': No such file or directory\n".encode())
        return Outcome(stdout="".join(f"{name}\n" for name in self._files.list_directory(path)).encode())

    def _mkdir(self, arguments: list[str], _stdin: bytes) -> Outcome:
        for path in _operands(arguments):
            self._files.make_directory(path)
        return Outcome()

    def _mv(self, arguments: list[str], _stdin: bytes) -> Outcome:
        paths = _operands(arguments)
        if len(paths) != 2 or paths[0] not in self._files:
            return Outcome(exit_code=1, stderr=f"mv: cannot stat {paths[:1]}: No such file or directory\n".encode())
        self._files[paths[1]] = self._files.pop(paths[0])
        return Outcome()

    def _rm(self, arguments: list[str], _stdin: bytes) -> Outcome:
        for path in _operands(arguments):
            self._files.remove_tree(path)
        return Outcome()

    def _sha256sum(self, arguments: list[str], stdin: bytes) -> Outcome:
        path = (_operands(arguments) or ["-"])[0]
        data = stdin if path == "-" else self._files.get(path)
        if data is None:
            return Outcome(exit_code=1, stderr=f"sha256sum: {path}: No such file or directory\n".encode())
        return Outcome(stdout=f"{hashlib.sha256(data).hexdigest()}  {path}\n".encode())

    def _stat(self, arguments: list[str], _stdin: bytes) -> Outcome:
        match [argument for argument in arguments if argument not in ("-L", "--")]:
            case ["-c", "%s", path] if path in self._files:
                return Outcome(stdout=f"{len(self._files[path])}\n".encode())
            case _:
                return Outcome(exit_code=1, stderr=b"stat: only -c %s of a file is known, and no such file\n")

    def _tee(self, arguments: list[str], stdin: bytes) -> Outcome:
        for path in _operands(arguments):
            self._files[path] = stdin
        return Outcome(stdout=stdin)

    def _bracket(self, arguments: list[str], stdin: bytes) -> Outcome:
        if arguments[-1:] != ["]"]:
            return Outcome(exit_code=2, stderr=b"[: missing ]\n")
        return self._test(arguments[:-1], stdin)

    def _test(self, arguments: list[str], stdin: bytes) -> Outcome:
        match arguments:
            case ["!", *rest]:
                inner = self._test(rest, stdin)
                return Outcome(exit_code={0: 1, 1: 0}.get(inner.exit_code, 2), stderr=inner.stderr)
            case ["-e", path]:
                holds = path in self._files or self._files.is_directory(path)
            case ["-f", path]:
                holds = path in self._files
            case ["-d", path]:
                holds = self._files.is_directory(path)
            case ["-L", _]:
                holds = False
            case [left, "=", right]:
                holds = left == right
            case ["-n", text] | [text]:
                holds = bool(text)
            case ["-z", text]:
                holds = not text
            case _:
                return Outcome(exit_code=2, stderr=b"test: unknown expression\n")
        return Outcome(exit_code=0 if holds else 1)

    def _touch(self, arguments: list[str], _stdin: bytes) -> Outcome:
        for path in _operands(arguments):
            self._files.setdefault(path, b"")
        return Outcome()

    # Session

    def _date(self, arguments: list[str], _stdin: bytes) -> Outcome:
        match [argument for argument in arguments if argument != "-u"]:
            case ["-s", moment] if re.fullmatch(r"@\d+(\.\d+)?", moment):
                self._clock.set_date(round(float(moment[1:]) * 1e9))
            case ["+%s"]:
                pass
            case _:
                return Outcome(exit_code=1, stderr=b"date: only -s @SECONDS and +%s are known\n")
        return Outcome(stdout=b"%d\n" % (self._clock.date_ns() // 10**9))

    def _ps(self, _arguments: list[str], _stdin: bytes) -> Outcome:
        windows = self._windows()
        names = ["systemd", "qemu-ga"]
        if windows is not None:
            names += ["guestd", *(window.wm_class.partition(".")[0] for window in windows.list_windows())]
        return Outcome(stdout="".join(f"S    {name}\n" for name in names).encode())

    def _wmctrl(self, arguments: list[str], _stdin: bytes) -> Outcome:
        windows = self._windows()
        if windows is None:
            return Outcome(exit_code=1, stderr=b"Cannot open display.\n")
        match [argument for argument in arguments if argument not in ("-i", "-u", "-x")]:
            case ["-l"]:
                rows = [f"0x{id:08x}  0 {name}  guest {title}\n" for id, name, title in windows.list_windows()]
                return Outcome(stdout="".join(rows).encode())
            case ["-a", window]:
                return Outcome(exit_code=0 if windows.activate_window(window) else 1)
            case ["-c", window]:
                return Outcome(exit_code=0 if windows.close_window(window) else 1)
            case _:
                return Outcome(exit_code=1, stderr=b"wmctrl: only -l, -a and -c are known\n")

    def _xclip(self, arguments: list[str], stdin: bytes) -> Outcome:
        if "-o" in arguments:
            return Outcome(stdout=self._clipboard)
        self._clipboard = stdin
        return Outcome()


def _succeed(_arguments: list[str], _stdin: bytes) -> Outcome:
    return Outcome()


def _echo(arguments: list[str], _stdin: bytes) -> Outcome:
    return Outcome(stdout=(" ".join(arguments) + "\n").encode())


def _printf(arguments: list[str], _stdin: bytes) -> Outcome:
    match arguments:
        case ["%s\\n", text]:
            return Outcome(stdout=f"{text}\n".encode())
        case ["%s", text] | [text] if "%" not in text or len(arguments) == 2:
            return Outcome(stdout=text.replace("\\n", "\n").encode())
        case _:
            return Outcome(exit_code=1, stderr=b"printf: only TEXT and %s TEXT are known\n")


def _sleep(arguments: list[str], _stdin: bytes) -> Outcome:
    try:
        return Outcome(duration_s=float(arguments[0]))
    except (IndexError, ValueError):
        return Outcome(exit_code=1, stderr=b"sleep: missing or invalid time interval\n")


def _operands(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if not argument.startswith("-")]
