"""Scripts of ours as commands that a Windows guest runs."""


def powershell(script: str, **values: str) -> tuple[str, ...]:
    """Return a command that runs a script with values as its variables; its output is UTF-8, an error ends it."""
    assigned = "".join(f"${name} = {_literal(value)}\n" for name, value in values.items())
    head = "$ErrorActionPreference = 'Stop'\n[Console]::OutputEncoding = [Text.UTF8Encoding]::new($false)\n"
    return ("powershell.exe", "-NoProfile", "-NonInteractive", "-Command", f"{head}{assigned}{script}")


def _literal(value: str) -> str:
    # In a PowerShell string in single quotes, a quote (of which there are five) is the only character that means more.
    return "'" + "".join(character * 2 if character in "'‘’‚‛" else character for character in value) + "'"
