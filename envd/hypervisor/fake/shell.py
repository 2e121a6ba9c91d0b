"""A shell small enough for a fake guest: lists, conditions, parameters and redirections. Pure but for its callbacks.

It knows `;`, newlines, `&&`, `||`, `if`/`elif`/`else`/`fi`, `exec`, `exit`, `set -e`, `$1` and `${NAME}`, quotes, `>`,
`>>` and `2>`. What it does not know is a syntax error, never a guess.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|\#[^\n]*|\\\n)"""
    r"""|(?P<operator>&&|\|\||[;\n]|2>&1|2>>|2>|>>|>)"""
    r"""|(?P<word>(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s;&|<>'"\\`()])+)""",
    re.DOTALL,
)
_PIECE = re.compile(
    r"""'(?P<raw>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)|(?P<bare>[^'"\\]+)""", re.DOTALL
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ENDS = frozenset({";", "\n", "&&", "||", ""})
_RESERVED = frozenset({"then", "elif", "else", "fi"})


class Ran(NamedTuple):
    """What a script or a command of it did."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""


class _ScriptEnd(Exception):
    pass


class _SyntaxError(Exception):
    pass


def run_script(
    script: str,
    *,
    variables: Mapping[str, str],
    run: Callable[[list[str]], Ran],
    files: MutableMapping[str, bytes],
) -> Ran:
    """Run a script; `run` runs one program, `files` takes redirected output."""
    shell = _Shell(variables, run, files)
    try:
        shell.read(script)
    except _ScriptEnd:
        pass
    except _SyntaxError as error:
        return Ran(2, bytes(shell.stdout), f"sh: 1: Syntax error: {error}\n".encode())
    return Ran(shell.status, bytes(shell.stdout), bytes(shell.stderr))


class _Shell:
    """Parses and runs in one pass; what must not run is parsed with `active=False`."""

    def __init__(
        self,
        variables: Mapping[str, str],
        run: Callable[[list[str]], Ran],
        files: MutableMapping[str, bytes],
    ) -> None:
        self.status = 0
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._variables = variables
        self._run = run
        self._files = files
        self._tokens: Iterator[str] = iter(())
        self._next = ""
        self._ends_on_failure = False

    def read(self, script: str) -> None:
        """Run a whole script."""
        self._tokens = iter(list(_tokens(script)))
        self._advance()
        self.block(active=True, until=frozenset({""}))

    def block(self, *, active: bool, until: frozenset[str], is_condition: bool = False) -> None:
        """Run commands until one of these words stands where a command would."""
        while True:
            while self._next in (";", "\n"):
                self._advance()
            if self._next in until:
                return
            if self._next in _RESERVED or self._next in _ENDS:
                raise _SyntaxError(f"{self._next or 'end of file'!r} unexpected")
            last_ran = self._and_or(active=active)
            # As in sh, a failure that is looked at, by `if`, `&&` or `||`, ends nothing.
            if last_ran and self._ends_on_failure and self.status != 0 and not is_condition:
                raise _ScriptEnd

    def _and_or(self, *, active: bool) -> bool:
        """Run a list; return whether its last command was among those that ran."""
        runs = active
        self._command(active=runs)
        while self._next in ("&&", "||"):
            wanted = self._next == "&&"
            self._advance()
            while self._next == "\n":
                self._advance()
            runs = active and (self.status == 0) == wanted
            self._command(active=runs)
        return runs

    def _command(self, *, active: bool) -> None:
        if self._next == "if":
            self._if(active=active)
            return
        words: list[str] = []
        redirections: list[tuple[str, str]] = []
        while self._next not in _ENDS:
            part = self._next
            self._advance()
            if part == "2>&1":
                redirections.append((part, ""))
            elif part in (">", ">>", "2>", "2>>"):
                redirections.append((part, self._expand(self._next)))
                self._advance()
            else:
                words.append(self._expand(part))
        if active and words:
            self._execute(words, redirections)

    def _if(self, *, active: bool) -> None:
        is_done = False
        while self._next in ("if", "elif"):
            self._advance()
            self.block(active=active and not is_done, until=frozenset({"then"}), is_condition=True)
            chosen = active and not is_done and self.status == 0
            self._advance()
            self.block(active=chosen, until=frozenset({"elif", "else", "fi"}))
            is_done = is_done or chosen
        if self._next == "else":
            self._advance()
            self.block(active=active and not is_done, until=frozenset({"fi"}))
        elif active and not is_done:
            self.status = 0
        self._advance()

    def _execute(self, words: list[str], redirections: list[tuple[str, str]]) -> None:
        is_last = words[0] == "exec"
        words = words[1:] if is_last else words
        if words[:1] == ["exit"]:
            self.status = int(words[1]) if len(words) > 1 else self.status
            raise _ScriptEnd
        if words == ["set", "-e"]:
            self._ends_on_failure, self.status = True, 0
            return
        ran = Ran(0) if words in ([], [":"]) else self._run(words)
        self.status = ran.exit_code
        self._output(ran, redirections)
        if is_last and words:
            raise _ScriptEnd

    def _output(self, ran: Ran, redirections: list[tuple[str, str]]) -> None:
        targets = {"1": "", "2": "err"}
        for operator, path in redirections:
            if operator == "2>&1":
                targets["2"] = targets["1"]
                continue
            stream = "2" if operator.startswith("2") else "1"
            targets[stream] = f"file {path}"
            if not operator.endswith(">>") or path not in self._files:
                self._files[path] = b""
        for data, target in ((ran.stdout, targets["1"]), (ran.stderr, targets["2"])):
            kind, _, path = target.partition(" ")
            if kind == "file":
                self._files[path] += data
            else:
                (self.stderr if kind == "err" else self.stdout).extend(data)

    def _expand(self, word: str) -> str:
        def value(match: re.Match[str]) -> str:
            return self._variables.get(match[1] or match[2], "")

        text = ""
        for piece in _PIECE.finditer(word):
            if piece["raw"] is not None:
                text += piece["raw"]
            elif piece["escaped"] is not None:
                text += piece["escaped"]
            elif piece["quoted"] is not None:
                text += _VARIABLE.sub(value, re.sub(r'\\(["\\`])', r"\1", piece["quoted"]))
            else:
                text += _VARIABLE.sub(value, piece["bare"])
        return text

    def _advance(self) -> None:
        self._next = next(self._tokens, "")


def _tokens(script: str) -> Iterator[str]:
    position = 0
    while position < len(script):
        match = _TOKEN.match(script, position)
        if match is None:
            raise _SyntaxError(f"{script[position : position + 10]!r} is not known here")
        position = match.end()
        if match["space"] is None:
            yield match[0]
