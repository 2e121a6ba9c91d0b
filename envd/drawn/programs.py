"""Programs of a fake guest, over files in memory: those that the host, task setups, checkers and tests run; its clock.

A program supports only the options used by its callers and fails with a usage error on others. It returns at once;
`ProgramResult.duration_s` is the time that the real program would take.
"""

import hashlib
import json
import posixpath
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Protocol

from envd.drawn.files import DrawnFiles
from envd.drawn.parts import ProgramResult
from envd.drawn.toolbox import DrawnToolbox
from envd.tasks.queries import OpenWindow

#: The shell scripts that run: one command, its output printed, discarded or appended to a file.
_SCRIPT = re.compile(r"(exec )?(?P<command>[^;&|<>`$()\n]+?) *(?P<redirection>>/dev/null 2>&1|>> *(?P<path>\S+))?")
#: Where the runner of every drawn guest listens: `envd.drawn.runner`.
RUNNER_PORT = 49_983
RUNNER_SECRET = "drawn"  # noqa: S105 -- of a guest that has no users
#: Exit code of `list-directory` if the directory does not exist.
_NO_DIRECTORY = 66
#: Exit code of `compare-unchanged` if nothing was recorded.
_NOT_RECORDED = 3


class GuestClock:
    """Time inside one guest. A copy continues from the time at which it was copied."""

    def __init__(self) -> None:
        """Start the clock at the host's date."""
        self.set_to_ns: int | None = None
        """Last date set, in nanoseconds since 1970; None if never set."""
        self._run_ns = 0
        self._since_ns: int | None = time.monotonic_ns()
        self._date_offset_ns = time.time_ns()

    def stop(self) -> None:
        if self._since_ns is not None:
            self._run_ns += time.monotonic_ns() - self._since_ns
            self._since_ns = None

    def start(self) -> None:
        if self._since_ns is None:
            self._since_ns = time.monotonic_ns()

    def monotonic_s(self) -> float:
        """Return how long the guest has run, in seconds."""
        return self._monotonic_ns() / 1e9

    def date_ns(self) -> int:
        """Return the guest's date, in nanoseconds since 1970."""
        return self._date_offset_ns + self._monotonic_ns()

    def set_date(self, date_ns: int) -> None:
        self.set_to_ns = date_ns
        self._date_offset_ns = date_ns - self._monotonic_ns()

    def _monotonic_ns(self) -> int:
        return self._run_ns + (0 if self._since_ns is None else time.monotonic_ns() - self._since_ns)


class WindowManager(Protocol):
    """Answers `wmctrl` and `ps`."""

    def list_windows(self) -> list[OpenWindow]:
        """Return open windows, the active one last."""

    def activate_window(self, title: str) -> bool:
        """Raise a window by title or id (`0x...`)."""

    def close_window(self, title: str) -> bool:
        """Close a window by title or id (`0x...`)."""


class Programs:
    """Runs programs in one guest."""

    def __init__(
        self,
        files: DrawnFiles,
        *,
        windows: Callable[[], WindowManager | None],
        clock: GuestClock | None = None,
        power_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._files = files
        self._windows = windows
        self._clock = clock or GuestClock()
        self._power_off = power_off
        self._clipboard = b""
        self.toolbox = DrawnToolbox(files, self._run)
        self._programs: dict[str, Callable[[list[str], bytes], ProgramResult]] = {
            "cat": self._cat,
            "date": self._date,
            "echo": self._echo,
            "false": self._false,
            "mkdir": self._mkdir,
            "poweroff": self._poweroff,
            "ps": self._ps,
            "python3": self._python,
            "rm": self._rm,
            "sh": self._sh,
            "sleep": self._sleep,
            "test": self._test,
            "true": self._true,
            "wmctrl": self._wmctrl,
            "xclip": self._xclip,
            "xdotool": self._xdotool,
        }

    def run(self, argv: Sequence[str], *, stdin: bytes = b"") -> ProgramResult:
        """Run a program to its end.

        Raises:
            FileNotFoundError: The guest has no such program.
        """
        name = posixpath.basename(argv[0])
        if name not in self._programs:
            raise FileNotFoundError(argv[0])
        return self._programs[name](list(argv[1:]), stdin)

    def _run(self, argv: list[str], stdin: bytes) -> ProgramResult:
        return self.run(argv, stdin=stdin)

    def _echo(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        return ProgramResult(stdout=f"{' '.join(arguments)}\n".encode())

    def _false(self, _arguments: list[str], _stdin: bytes) -> ProgramResult:
        return ProgramResult(exit_code=1)

    def _true(self, _arguments: list[str], _stdin: bytes) -> ProgramResult:
        return ProgramResult()

    def _sleep(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        return ProgramResult(duration_s=float(arguments[0]))

    def _sh(self, arguments: list[str], stdin: bytes) -> ProgramResult:
        match arguments:
            # The scripts of checkers, `desktop.freezing` and `authoring.demonstration`, by the names in their $0.
            case ["-c", _, "probe-file", path]:
                return self._probe_file(path)
            case ["-c", _, "list-directory", path]:
                return self._list_directory(path)
            case ["-c", _, "list-files", *places]:
                states = (state.partition("\t") for state in self._states(places))
                return ProgramResult(stdout="".join(f"{sha}  {name}\n" for name, _, sha in states).encode())
            case ["-c", _, "record-unchanged", record, outputs, *places]:
                self._files[record] = "\n".join([outputs, *self._states(places)]).encode()
                return ProgramResult()
            case ["-c", _, "compare-unchanged", record, outputs, new_files, *places]:
                return self._compare(record, [outputs, *self._states(places)], ignores_new=new_files == "ignore")
            case ["-c", _, "freeze-session" | "thaw-session"]:
                # Nothing acts in a drawn desktop but the host.
                return ProgramResult()
            case ["-c", _, "run-as-user", *argv] if argv and posixpath.basename(argv[0]) in self._programs:
                return self.run(argv, stdin=stdin)
            case ["-c", _, "run-as-user", *argv]:
                return ProgramResult(exit_code=127, stderr=f"env: {argv[0]}: No such file or directory\n".encode())
            case ["-c", script] if (parsed := _SCRIPT.fullmatch(script)) is not None:
                argv = shlex.split(parsed["command"])
            case _:
                return _usage_error("sh", "-c with a single command")
        if argv[0] == "exit":
            return ProgramResult(exit_code=int(argv[1]))
        try:
            outcome = self.run(argv, stdin=stdin)
        except FileNotFoundError:
            return ProgramResult(exit_code=127, stderr=f"sh: 1: {argv[0]}: not found\n".encode())
        if path := parsed["path"]:
            self._files[path] = self._files.get(path, b"") + outcome.stdout
            return replace(outcome, stdout=b"")
        return replace(outcome, stdout=b"", stderr=b"") if parsed["redirection"] else outcome

    # Files

    def _probe_file(self, path: str) -> ProgramResult:
        if path in self._files:
            return ProgramResult(stdout=b"%d\n" % len(self._files[path]))
        return ProgramResult(stdout=b"other\n" if self._files.is_directory(path) else b"absent\n")

    def _list_directory(self, path: str) -> ProgramResult:
        if not self._files.is_directory(path):
            return ProgramResult(exit_code=_NO_DIRECTORY)
        kinds = {True: "d", False: "f"}
        entries = self._files.list_directory(path)
        rows = [kinds[self._files.is_directory(posixpath.join(path, name))] + name + "\0" for name in entries]
        return ProgramResult(stdout="".join(rows).encode())

    def _states(self, places: list[str]) -> list[str]:
        """Return the files and directories that `find` would list, each with its state."""
        start = places.index("-path") if "-path" in places else len(places)
        roots, pruned = places[:start], places[start + 1 :: 4]
        states = dict.fromkeys(self._files.directories, "directory")
        states |= {name: hashlib.sha256(data).hexdigest() for name, data in self._files.items()}
        return [
            f"{name}\t{state}"
            for name, state in sorted(states.items())
            if any(f"{name}/".startswith(f"{root}/") for root in roots)
            and not any(fnmatchcase(name, each) or fnmatchcase(name, f"{each}/*") for each in pruned)
        ]

    def _compare(self, record: str, found: list[str], *, ignores_new: bool) -> ProgramResult:
        if record not in self._files:
            return ProgramResult(exit_code=_NOT_RECORDED)
        before = self._files[record].decode().split("\n")
        now = "\n".join(found).split("\n")
        changed = [line for line in before if line not in now]
        changed += [line for line in now if line not in before and not ignores_new]
        return ProgramResult(stdout="\n".join(changed).encode())

    def _cat(self, arguments: list[str], stdin: bytes) -> ProgramResult:
        paths = _operands(arguments)
        missing = [path for path in paths if path not in self._files]
        return ProgramResult(
            exit_code=1 if missing else 0,
            stdout=b"".join(self._files.get(path, b"") for path in paths) if paths else stdin,
            stderr="".join(f"cat: {path}: No such file or directory\n" for path in missing).encode(),
        )

    def _mkdir(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        for path in _operands(arguments):
            self._files.make_directory(path)
        return ProgramResult()

    def _rm(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        for path in _operands(arguments):
            self._files.remove_tree(path)
        return ProgramResult()

    def _test(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        match arguments:
            case ["-e", path]:
                holds = path in self._files or self._files.is_directory(path)
            case ["-f", path]:
                holds = path in self._files
            case ["-d", path]:
                holds = self._files.is_directory(path)
            case _:
                return _usage_error("test", "-e, -f and -d")
        return ProgramResult(exit_code=0 if holds else 1)

    def _python(self, arguments: list[str], stdin: bytes) -> ProgramResult:
        """Run one of the programs that the host sends: the toolbox, or the start of the runner."""
        if arguments[-2:-1] == ["start"]:
            return ProgramResult(stdout=json.dumps({"port": RUNNER_PORT, "secret": RUNNER_SECRET}).encode())
        return self.toolbox.answer(arguments, stdin)

    # Session

    def _date(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        match arguments:
            case ["-u", "-s", moment] if re.fullmatch(r"@\d+(\.\d+)?", moment):
                self._clock.set_date(round(float(moment[1:]) * 1e9))
                return ProgramResult()
            case _:
                return _usage_error("date", "-u -s @SECONDS")

    def _poweroff(self, _arguments: list[str], _stdin: bytes) -> ProgramResult:
        self._power_off()
        return ProgramResult()

    def _ps(self, _arguments: list[str], _stdin: bytes) -> ProgramResult:
        windows = self._windows()
        names = ["systemd", "qemu-ga"]
        if windows is not None:
            names += ["guestd", *(window.wm_class.partition(".")[0] for window in windows.list_windows())]
        return ProgramResult(stdout="".join(f"S    {name}\n" for name in names).encode())

    def _wmctrl(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        windows = self._windows()
        if windows is None:
            return ProgramResult(exit_code=1, stderr=b"Cannot open display.\n")
        match [argument for argument in arguments if argument not in ("-i", "-u", "-x", "-G")]:
            case ["-l"]:
                found = windows.list_windows()
                boxes = [" ".join(map(str, each.box)) + " " if "-G" in arguments else "" for each in found]
                rows = (
                    f"{each.window_id}  0 {box}{each.wm_class}  guest {each.title}\n"
                    for each, box in zip(found, boxes, strict=True)
                )
                return ProgramResult(stdout="".join(rows).encode())
            case ["-a", window]:
                return ProgramResult(exit_code=0 if windows.activate_window(window) else 1)
            case ["-c", window]:
                return ProgramResult(exit_code=0 if windows.close_window(window) else 1)
            case _:
                return _usage_error("wmctrl", "-l, -a and -c")

    def _xdotool(self, arguments: list[str], _stdin: bytes) -> ProgramResult:
        windows = self._windows()
        found = windows.list_windows() if windows is not None else []
        match arguments:
            case ["getwindowfocus"] if found:
                return ProgramResult(stdout=f"{int(found[-1].window_id, 16)}\n".encode())
            case ["search", "--onlyvisible", "--class", name]:
                fitting = [each for each in found if name.lower() in each.wm_class.lower()]
                text = "".join(f"{int(each.window_id, 16)}\n" for each in fitting)
                return ProgramResult(stdout=text.encode(), exit_code=0 if fitting else 1)
            case ["getwindowname", number]:
                titles = [each.title for each in found if str(int(each.window_id, 16)) == number]
                return ProgramResult(stdout=f"{titles[0]}\n".encode()) if titles else ProgramResult(exit_code=1)
            case _:
                return _usage_error("xdotool", "getwindowfocus, search --onlyvisible --class and getwindowname")

    def _xclip(self, arguments: list[str], stdin: bytes) -> ProgramResult:
        if "-o" in arguments:
            return ProgramResult(stdout=self._clipboard)
        self._clipboard = stdin
        return ProgramResult()


def _usage_error(program: str, supported: str) -> ProgramResult:
    return ProgramResult(exit_code=2, stderr=f"{program}: the fake guest supports only {supported}\n".encode())


def _operands(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if not argument.startswith("-")]
