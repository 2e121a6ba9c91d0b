"""Templates that need several applications, or a plan."""

import re

from envd.tasks.suites.desktop.parts import (
    CITIES,
    DESKTOP,
    DOCUMENTS,
    DONE,
    GOODS,
    HOME,
    NAMES,
    NEW_DOCUMENT,
    NEW_TERMINAL,
    SAVE,
    TOOLS,
    Step,
    Verb,
    all_of,
    command,
    edit,
    exactly,
    lines,
    number_is,
    save_as,
    show_folder,
    switch_to,
    text_is,
    until_window,
    weighted,
    write,
)
from envd.tasks.templates import Entry, Sampler

_CALCULATOR: Verb = {"kind": "launch", "argv": ["galculator"], "window": {"class": "galculator"}}
_SAYINGS = (
    "Still waters run deep.",
    "Measure twice, cut once.",
    "A watched pot never boils.",
    "Many hands make light work.",
    "No smoke without fire.",
    "Better late than never.",
    "The early bird catches the worm.",
)


def _keyed(text: str) -> list[Step]:
    """Press keys in the calculator, one per step. GTK ignores further presses for 0.25 s after each."""
    return [[{"type": key}] for key in text]


@DESKTOP.add(level=2, domain="calculator")
def work_out(rng: Sampler) -> Entry:
    """Answer with the calculator's result."""
    first, second, third = rng.randint(312, 998), rng.randint(47, 99), rng.randint(1000, 9999)
    result = first * second + third
    return {
        "tags": ["answer"],
        "instruction": (
            f"The calculator is on the screen. What is {first} times {second}, plus {third}? Answer with the number,"
            " digits only."
        ),
        "setup": [_CALCULATOR],
        "checker": {"kind": "answer", "equals": str(result)},
        "oracle": [*_keyed(f"{first}*{second}+{third}="), [{"done": str(result)}]],
    }


@DESKTOP.add(level=4, domain="flows")
def calculate_and_note(rng: Sampler) -> Entry:
    """Carry a number from the calculator into a document."""
    path = f"{DOCUMENTS}/product.txt"
    first, second = rng.randint(1234, 9876), rng.randint(5678, 9999)
    return {
        "tags": ["calculator", "editor"],
        "instruction": (
            f"Work out {first} times {second} with the calculator and write the result, digits only, into the document"
            " product.txt, which is open in the editor. Save the document."
        ),
        "setup": [write(path, ""), edit(path), _CALCULATOR],
        "checker": number_is(path, first * second),
        "oracle": [
            *_keyed(f"{first}*{second}="),
            [{"press": ["ctrl", "c"]}, {"click": {"x": 400, "y": 300}}],
            [{"press": ["ctrl", "v"]}],
            SAVE,
            DONE,
        ],
    }


def _serial(rng: Sampler) -> str:
    letters = ["".join(rng.sample("QXTRLMKDABPWZ", 4)) for _ in range(2)]
    return f"SN-{rng.randint(10034, 99999)}-{letters[0]}-{rng.randint(20119, 99999)}-{letters[1]}"


@DESKTOP.add(level=4, domain="flows")
def copy_serial_number(rng: Sampler) -> Entry:
    """Carry a line from one window to another."""
    device, inventory = f"{DOCUMENTS}/device.txt", f"{DOCUMENTS}/inventory.txt"
    serial, known = _serial(rng), [_serial(rng), _serial(rng)]
    about = lines(serial, f"Bought in {rng.choice(CITIES)}, two years of warranty.")
    return {
        "tags": ["editor", "clipboard", "windows"],
        "instruction": (
            "Two documents are open in two editor windows, one on top of the other. Copy the first line of device.txt,"
            " a long serial number, to the end of inventory.txt as a line of its own, and save inventory.txt."
        ),
        "setup": [
            write(device, about),
            write(inventory, lines(*known)),
            edit(device),
            edit(inventory),
            {"kind": "activate_window", "window": {"title": r"inventory\.txt"}},
        ],
        "checker": all_of(text_is(inventory, lines(*known, serial)), text_is(device, about)),
        "oracle": [
            switch_to(0),
            [{"press": ["ctrl", "home"]}, {"press": ["shift", "end"]}, {"press": ["ctrl", "c"]}],
            switch_to(1),
            [{"press": ["ctrl", "end"]}, {"press": ["ctrl", "v"]}, until_window(r"^\*.*inventory\.txt")],
            SAVE,
            DONE,
        ],
    }


@DESKTOP.add(level=4, domain="flows")
def find_open_and_edit(rng: Sampler) -> Entry:
    """Find a file, open it, change it."""
    place = rng.choice(("Projects", "House", "Garden", "Office"))
    old, new = rng.sample(("plumber", "electrician", "painter", "landlord", "dentist", "florist", "baker", "bank"), 2)
    path = f"{HOME}/{place}/todo.txt"
    return {
        "tags": ["files", "editor", "mouse"],
        "instruction": (
            f"The file manager shows the home directory. Go into the folder {place}, open the file todo.txt there with"
            f' a double click, change its only line from "call the {old}" to "call the {new}", and save it.'
        ),
        "setup": [
            write(path, f"call the {old}\n"),
            {"kind": "launch", "argv": ["pcmanfm", HOME], "window": {"class": "pcmanfm"}},
        ],
        "checker": text_is(path, f"call the {new}\n"),
        "oracle": [
            [{"click": {"x": 327, "y": 210}}],
            [{"click": {"x": 327, "y": 210, "count": 2}}, until_window(place, wm_class="pcmanfm")],
            [{"click": {"x": 327, "y": 210}}],
            [{"click": {"x": 327, "y": 210, "count": 2}}, until_window(r"todo\.txt", wm_class="mousepad")],
            [{"press": ["ctrl", "home"]}, {"press": "end"}, {"press": ["ctrl", "shift", "left"]}, {"type": new}],
            SAVE,
            DONE,
        ],
    }


@DESKTOP.add(level=5, domain="flows")
def sort_invoices(rng: Sampler) -> Entry:
    """Sort files by their content, and sum some of the amounts."""
    customers = rng.sample(("Ibsen", "Okafor", "Tanaka", "Silva", "Novak", "Haddad", "Larsen", "Moreau"), 5)
    totals = [rng.randint(120, 980) for _ in customers]
    paid = set(rng.sample((0, 3, 1, 2, 4), 2))
    names = [f"a-{101 + n}.txt" for n in range(len(customers))]
    total = sum(amount for n, amount in enumerate(totals) if n not in paid)
    folder = f"{HOME}/Invoices"
    return {
        "tags": ["terminal", "files", "editor"],
        "instruction": (
            f'The folder {folder} holds text files. Each has a line "Total:" with an amount and a line "Status:" with'
            " paid or open. Make a folder named paid inside Invoices and move all paid invoices into it. Then write the"
            " sum of the totals of the invoices that are still open, as a whole number alone on one line, into the file"
            " open-sum.txt in the home directory."
        ),
        "setup": [
            write(
                f"{folder}/{name}",
                lines(f"Customer: {customers[n]}", f"Total: {totals[n]}", f"Status: {'paid' if n in paid else 'open'}"),
            )
            for n, name in enumerate(names)
        ],
        "checker": weighted(
            (1, exactly(folder, "paid/", *(name for n, name in enumerate(names) if n not in paid))),
            (1, exactly(f"{folder}/paid", *(name for n, name in enumerate(names) if n in paid))),
            (2, number_is(f"{HOME}/open-sum.txt", total)),
        ),
        "oracle": [
            NEW_TERMINAL,
            command("cd ~/Invoices && mkdir paid && mv $(grep -l 'Status: paid' *.txt) paid/", makes=f"{folder}/paid"),
            command(
                "cat *.txt | awk '/^Total:/ {sum += $2} END {print sum}' > ~/open-sum.txt", makes=f"{HOME}/open-sum.txt"
            ),
            DONE,
        ],
    }


@DESKTOP.add(level=5, domain="flows")
def notes_from_two_places(rng: Sampler) -> Entry:
    """Gather facts from two files into a third."""
    essay = lines(
        f"The river rises near {rng.choice(CITIES)} and reaches the sea after {rng.randint(70, 900)} miles.",
        "Its upper course had not been mapped before the spring of that year.",
        f"We went in {rng.choice(('two', 'three', 'four'))} boats, with food for {rng.choice(('a', 'one'))} week.",
        *rng.sample(("It rained.", "The nights were cold and clear.", "We met no one on the way."), 2),
    )
    *sayings, last = rng.sample(_SAYINGS, 4)
    count = len(essay.split())
    path = f"{DOCUMENTS}/summary.txt"
    ends = re.escape(last)
    return {
        "tags": ["editor", "terminal", "dialog", "windows"],
        "instruction": (
            "Write a new document and save it as summary.txt in the Documents folder. Its first line is the number of"
            f" words in {DOCUMENTS}/essay.txt, as the command wc counts them. Its second line is the last line of"
            f" {DOCUMENTS}/quotes.txt."
        ),
        "setup": [write(f"{DOCUMENTS}/essay.txt", essay), write(f"{DOCUMENTS}/quotes.txt", lines(*sayings, last))],
        "checker": weighted(
            (1, {"kind": "file_text", "path": path, "matches": rf"\s*{count}\s*\n.*"}),
            (1, {"kind": "file_text", "path": path, "matches": rf"[^\n]*\n{ends}\s*"}),
        ),
        "oracle": [
            NEW_TERMINAL,
            [{"type": "cd ~/Documents; wc -w essay.txt; tail -n 1 quotes.txt\n"}],
            NEW_DOCUMENT,
            [{"type": lines(str(count), last)}],
            *save_as(path),
            DONE,
        ],
    }


@DESKTOP.add(level=4, domain="flows")
def list_a_folder(rng: Sampler) -> Entry:
    """Write down the files that the file manager shows."""
    names = sorted(name.lower() for name in rng.sample((*TOOLS, *GOODS), 4))
    place = rng.choice(("Workshop", "Pantry", "Cellar", "Attic"))
    path = f"{DOCUMENTS}/contents.txt"
    return {
        "tags": ["files", "editor"],
        "instruction": (
            f"Next to the editor, the file manager has the folder {place} open. Note down what is in it: fill"
            " contents.txt with the names of these files, one on each line, in the order of the alphabet and without"
            ' the ending ".txt". Save it.'
        ),
        "setup": [
            write(path, ""),
            *(write(f"{HOME}/{place}/{name}.txt", "") for name in names),
            edit(path),
            show_folder(f"{HOME}/{place}"),
        ],
        "checker": text_is(path, lines(*names)),
        "oracle": [[{"click": {"x": 400, "y": 50}}], [{"type": lines(*names)}], SAVE, DONE],
    }


@DESKTOP.add(level=4, domain="flows")
def answer_a_letter(rng: Sampler) -> Entry:
    """Read one document and write another as it asks."""
    asker, answerer = rng.sample(NAMES, 2)
    count, price = rng.randint(3, 40), rng.randint(6, 95)
    tool = rng.choice(TOOLS).lower()
    letter = lines(
        f"Dear {answerer},",
        f"please send {count} of the model {tool}-{rng.randint(2, 9)}.",
        f"Each costs {price} euro, as we agreed.",
        f"Yours, {asker}",
    )
    path = f"{DOCUMENTS}/reply.txt"
    return {
        "tags": ["editor", "dialog"],
        "instruction": (
            "Read the order in letter.txt. Then create reply.txt next to it with two lines: the first is the name of"
            " the person who wrote the order, the second is what the whole order costs in euro, as a bare number."
        ),
        "setup": [write(f"{DOCUMENTS}/letter.txt", letter), edit(f"{DOCUMENTS}/letter.txt")],
        "checker": {"kind": "file_text", "path": path, "matches": rf"\s*{asker}[^\S\n]*\n\s*{count * price}\s*"},
        "oracle": [NEW_DOCUMENT, [{"type": lines(asker, str(count * price))}], *save_as(path), DONE],
    }


@DESKTOP.add(level=5, domain="flows")
def tidy_downloads(rng: Sampler) -> Entry:
    """Sort files into folders by extension, and count them."""
    endings = {"txt": "Texts", "png": "Images", "csv": "Tables"}
    counts = rng.sample((3, 1, 4, 2, 5), 3)
    words = rng.sample([each.lower() for each in (*TOOLS, *GOODS)], sum(counts))
    files: dict[str, list[str]] = {}
    for ending, count in zip(endings, counts, strict=True):
        files[ending], words = [f"{word}.{ending}" for word in words[:count]], words[count:]
    counted = lines(*(f"{name} {len(files[ending])}" for ending, name in endings.items()))
    folder = f"{HOME}/Downloads"
    return {
        "tags": ["terminal", "files"],
        "instruction": (
            f"Clear up {folder}: make three folders in it, Texts, Images and Tables, and move every .txt, .png and"
            " .csv file into the one that fits. No file may stay outside. At the end, counts.txt in the home directory"
            " should tell how many files each folder got: three lines, each the folder's name, a space and the number,"
            " in the order given here."
        ),
        "setup": [write(f"{folder}/{name}", "x\n") for names in files.values() for name in names],
        "checker": weighted(
            (1, exactly(folder, *(f"{name}/" for name in endings.values()))),
            *((1, exactly(f"{folder}/{name}", *files[ending])) for ending, name in endings.items()),
            (1, text_is(f"{HOME}/counts.txt", counted)),
        ),
        "oracle": [
            NEW_TERMINAL,
            command(
                "cd Downloads; mkdir Texts Images Tables; mv *.txt Texts; mv *.png Images; mv *.csv Tables",
                makes=f"{folder}/Tables",
            ),
            command(
                'echo "$(for d in Texts Images Tables; do echo $d $(ls $d | wc -l); done)" > ~/counts.txt',
                makes=f"{HOME}/counts.txt",
            ),
            DONE,
        ],
    }
