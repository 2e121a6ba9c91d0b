"""Templates about the terminal, which opens in the home directory."""

from envd.tasks.suites.desktop.parts import (
    CITIES,
    COLOURS,
    DESKTOP,
    DONE,
    GOODS,
    HOME,
    NAMES,
    NEW_TERMINAL,
    TOOLS,
    all_of,
    command,
    lines,
    number_is,
    open_terminal,
    text_is,
    weighted,
    write,
)
from envd.tasks.templates import Entry, Sampler

_DOMAIN = "terminal"


@DESKTOP.add(level=3, domain=_DOMAIN)
def make_project_tree(rng: Sampler) -> Entry:
    """Make directories and an empty file."""
    top = rng.choice(("project", "thesis", "garden", "website", "novel", "workshop"))
    first, second = rng.sample(("src", "docs", "data", "tests", "plans", "drafts", "media"), 2)
    name = rng.choice(("README.md", "NOTES.md", "TODO.md", "LICENSE"))
    return {
        "instruction": (
            f"A terminal is open. In the home directory, make a directory named {top} that holds the directories"
            f" {first} and {second}, and an empty file {name} directly in {top}."
        ),
        "setup": [open_terminal()],
        "checker": weighted(
            (2, {"kind": "directory", "path": f"{HOME}/{top}", "entries": [f"{first}/", f"{second}/"]}),
            (1, text_is(f"{HOME}/{top}/{name}", "")),
        ),
        "oracle": [
            command(f"mkdir -p {top}/{first} {top}/{second}", makes=f"{HOME}/{top}/{second}"),
            command(f"touch {top}/{name}"),
            DONE,
        ],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def count_errors(rng: Sampler) -> Entry:
    """Count lines of a log."""
    count = rng.randint(5, 14)
    disk = rng.randint(2, 9)
    bad = [f"ERROR disk {disk} is slow", "ERROR backup of home failed: ERROR 28", "ERROR lost the time server"]
    good = ["INFO  started", "INFO  an error was corrected", "WARN  3 Errors so far", "INFO  backup ends"]
    messages = [each for n in range(count) for each in (bad[n % len(bad)], *good[: n % len(good)])]
    log = lines(*(f"08:{n // 60:02}:{n % 60:02} {text}" for n, text in enumerate(messages, rng.randint(1, 40))))
    return {
        "instruction": (
            f"A terminal is open. Count the lines of {HOME}/logs/server.log that contain the word ERROR in capital"
            " letters, and save that number, alone on one line, in the file errors.txt in the home directory."
        ),
        "setup": [write(f"{HOME}/logs/server.log", log), open_terminal()],
        "checker": number_is(f"{HOME}/errors.txt", count),
        "oracle": [command("grep -c ERROR logs/server.log > errors.txt", makes=f"{HOME}/errors.txt"), DONE],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def count_tables(rng: Sampler) -> Entry:
    """Count files of one kind."""
    names = rng.sample(("north", "south", "east", "west", "total", "stock", "prices", "staff", "rent", "tax"), 10)
    count = rng.choice((7, 3, 4, 5, 6, 8, 9))
    year = rng.choice((2023, 2021, 2022, 2024, 2025))
    tables = [f"{name}.csv" for name in names[:count]]
    others = ["csv.txt", "notes.csv.bak", "map.png", *(f"{year}/{name}" for name in tables[:2])]
    return {
        "tags": ["answer"],
        "instruction": (
            f"How many files whose names end in .csv are in the folder {HOME}/Data, not counting those in folders"
            " inside it? Answer with the number alone."
        ),
        "setup": [write(f"{HOME}/Data/{name}", "") for name in (*tables, *others)],
        "checker": {"kind": "answer", "equals": str(count)},
        "oracle": [NEW_TERMINAL, [{"type": "ls Data/*.csv | wc -l\n"}], [{"done": str(count)}]],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def sort_and_drop_repeats(rng: Sampler) -> Entry:
    """Sort a list and remove duplicates."""
    words = rng.sample((*GOODS, *TOOLS), 6)
    listed = [*words, *words[1:4], words[2]]
    return {
        "instruction": (
            f"Use the terminal. {HOME}/stock.txt has one article per line, in no order and some of them more than once."
            f" Make {HOME}/articles.txt from it: every article once, in alphabetical order, one per line. Leave"
            " stock.txt alone."
        ),
        "setup": [write(f"{HOME}/stock.txt", lines(*listed)), open_terminal()],
        "checker": all_of(
            text_is(f"{HOME}/articles.txt", lines(*sorted(words))), text_is(f"{HOME}/stock.txt", lines(*listed))
        ),
        "oracle": [command("sort -u stock.txt > articles.txt", makes=f"{HOME}/articles.txt"), DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def make_script_runnable(rng: Sampler) -> Entry:
    """Make a file executable."""
    name = f"{rng.choice(('backup', 'deploy', 'cleanup', 'greet', 'sync', 'report'))}.sh"
    said = f"{rng.choice(('ready', 'started', 'hello'))} {rng.choice(NAMES)} {rng.randint(1, 99)}"
    path = f"{HOME}/bin/{name}"
    return {
        "instruction": (
            f"The shell refuses to run {path} because the file lacks the permission for it. Grant its owner the right"
            " to execute it; a terminal is open. What the script says must stay the same."
        ),
        "setup": [write(path, f"#!/bin/sh\necho {said}\n"), open_terminal()],
        "checker": {
            "kind": "command",
            "argv": ["sh", "-c", 'test -x "$1" && "$1" || exit 1', "sh", path],
            "stdout": {"equals": said},
        },
        "oracle": [command(f"chmod u+x bin/{name}"), DONE],
    }


@DESKTOP.add(level=4, domain=_DOMAIN)
def find_the_note(rng: Sampler) -> Entry:
    """Search many files for a phrase, and copy the matching file."""
    rooms = rng.sample(CITIES, 6)
    place = rng.randint(2, 5)
    code = f"{rng.choice(COLOURS)}-{rng.randint(100, 999)}"
    notes = [
        write(
            f"{HOME}/rooms/{room.lower()}/{n}/note.txt",
            lines(f"Room {room}", f"code word: {code}" if n == place else "nothing special"),
        )
        for n, room in enumerate(rooms)
    ]
    found = lines(f"Room {rooms[place]}", f"code word: {code}")
    return {
        "instruction": (
            f'Somewhere below {HOME}/rooms, in folders within folders, is one note.txt that mentions a "code word".'
            f" Copy that file to {HOME}/found.txt. A search in a terminal is the quickest way."
        ),
        "setup": notes,
        "checker": text_is(f"{HOME}/found.txt", found),
        "oracle": [
            NEW_TERMINAL,
            command("cp $(grep -rl 'code word' rooms) found.txt", makes=f"{HOME}/found.txt"),
            DONE,
        ],
    }
