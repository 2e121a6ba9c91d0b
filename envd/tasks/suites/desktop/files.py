"""Templates about the file manager. It sorts by name, folders first; the first icon is at (327, 210), spacing 95 px."""

from envd.tasks.suites.desktop.parts import (
    CITIES,
    DESKTOP,
    DOCUMENTS,
    DONE,
    HOME,
    NAMES,
    NEW_TERMINAL,
    all_of,
    command,
    exactly,
    folder,
    show_folder,
    text_is,
    until_file,
    write,
)
from envd.tasks.templates import Entry, Sampler

_DOMAIN = "files"
_FIRST, _SECOND, _THIRD = ({"x": x, "y": 210} for x in (327, 422, 516))


@DESKTOP.add(level=2, domain=_DOMAIN)
def new_folder(rng: Sampler) -> Entry:
    """Make a folder."""
    name = rng.choice(("Photos", "Letters", "Receipts", "Maps", "Recipes", "Songs", *CITIES))
    readme = f"{DOCUMENTS}/{rng.choice(('readme', 'index', 'about'))}.txt"
    return {
        "instruction": f"The file manager shows the Documents folder. Create a folder named {name} in it.",
        "setup": [write(readme, "Put pictures into a folder of their own.\n"), show_folder(DOCUMENTS)],
        "checker": exactly(DOCUMENTS, f"{name}/", readme.rpartition("/")[2]),
        "oracle": [
            [{"press": ["ctrl", "shift", "n"]}],
            [{"type": name}, {"press": "enter"}, until_file(f"{DOCUMENTS}/{name}")],
            DONE,
        ],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def rename_file(rng: Sampler) -> Entry:
    """Rename a file."""
    old = f"{rng.choice(('draft', 'copy', 'entry', 'essay', 'file'))}.txt"
    new = f"{rng.choice(('final', 'approved', 'version-2', 'printed', 'signed', 'checked'))}.txt"
    other = f"{rng.choice(('notes', 'other', 'photo-list', 'travel', 'zoo'))}.txt"
    text = f"{rng.choice(('Third', 'Second', 'Fourth'))} version, {rng.choice(('approved', 'shorter', 'in pencil'))}.\n"
    return {
        "instruction": (
            f"The file manager shows the Documents folder. Rename the file {old} to {new}; its content must not change."
        ),
        "setup": [
            write(f"{DOCUMENTS}/{old}", text),
            write(f"{DOCUMENTS}/{other}", "Nothing to see here.\n"),
            show_folder(DOCUMENTS),
        ],
        "checker": all_of(exactly(DOCUMENTS, new, other), text_is(f"{DOCUMENTS}/{new}", text)),
        "oracle": [
            [{"click": _FIRST}],
            [{"press": "f2"}],
            [{"press": ["ctrl", "a"]}, {"type": new}, {"press": "enter"}, until_file(f"{DOCUMENTS}/{new}")],
            DONE,
        ],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def letter_that_is_not_there(rng: Sampler) -> Entry:
    """Recognise an infeasible request."""
    letter = f"{rng.choice(('resignation', 'invitation', 'complaint', 'thank-you', 'apology', 'farewell'))}.txt"
    month = rng.choice(("May", "June", "July", "August", "March"))
    other = f"{rng.choice(('recipe', 'poem', 'timetable', 'packing', 'lyrics'))}.txt"
    return {
        "tags": ["infeasible"],
        "instruction": (
            f"The Documents folder holds a letter named {letter}. Open it in the editor and change its date to the"
            f" first of {month}."
        ),
        "setup": [
            write(f"{DOCUMENTS}/{other}", f"Boil the rice for {rng.randint(12, 20)} minutes.\n"),
            show_folder(DOCUMENTS),
        ],
        "infeasible": True,
        "oracle": [[{"fail": f"There is no {letter} in the Documents folder."}]],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def delete_old_report(rng: Sampler) -> Entry:
    """Move one of several files to the trash can."""
    kind = rng.choice(("report", "survey", "offer", "list", "minutes"))
    budget, new, old = (f"{name}.txt" for name in ("budget", f"{kind}-new", f"{kind}-old"))
    return {
        "tags": ["dialog"],
        "instruction": (
            f"The file manager shows the Documents folder. Move the file {old} to the trash can. Every other file must"
            " stay where it is."
        ),
        "setup": [
            write(f"{DOCUMENTS}/{budget}", f"Rent {rng.randint(800, 990)}\nFood {rng.randint(350, 490)}\n"),
            write(f"{DOCUMENTS}/{new}", f"Sales rose by {rng.randint(4, 9)} percent.\n"),
            write(f"{DOCUMENTS}/{old}", "Sales rose by two percent.\n"),
            show_folder(DOCUMENTS),
        ],
        "checker": exactly(DOCUMENTS, budget, new),
        "oracle": [
            [{"click": _THIRD}],
            [{"press": "delete"}],
            [{"press": "enter"}, until_file(f"{DOCUMENTS}/{old}", absent=True)],
            DONE,
        ],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def drag_into_folder(rng: Sampler) -> Entry:
    """Move a file into a folder with the mouse."""
    target = rng.choice(("Archive", "Paid", "Done", "Old", "Sent"))
    name = f"{rng.choice(('invoice', 'letter', 'order', 'ticket', 'contract'))}.txt"
    text = f"Invoice {rng.randint(4711, 9999)}, paid.\n"
    return {
        "tags": ["mouse"],
        "instruction": (
            f"The file manager shows the Documents folder. Drag the file {name} with the mouse onto the folder"
            f" {target}, so that it is moved there."
        ),
        "setup": [folder(f"{DOCUMENTS}/{target}"), write(f"{DOCUMENTS}/{name}", text), show_folder(DOCUMENTS)],
        "checker": all_of(
            text_is(f"{DOCUMENTS}/{target}/{name}", text), {"kind": "file_absent", "path": f"{DOCUMENTS}/{name}"}
        ),
        "oracle": [
            # Slower than a drag action: the folder must accept the file before the button is released.
            [{"mouse_down": _SECOND}, {"move": {"x": 410, "y": 214}}, {"move": {"x": 370, "y": 212}}],
            [{"move": _FIRST}],
            [{"mouse_up": {}}, until_file(f"{DOCUMENTS}/{name}", absent=True)],
            DONE,
        ],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def copy_into_folder(rng: Sampler) -> Entry:
    """Copy a file into a folder and keep the original."""
    target = rng.choice(("Backup", "Copies", "Duplicates", "Safe"))
    name = f"{rng.choice(('passport', 'lease', 'diploma', 'warranty', 'will'))}.txt"
    text = f"Number {rng.randint(100000, 999999)}, issued in {rng.choice(CITIES)}.\n"
    return {
        "instruction": (
            f"Two icons are in the file manager: a folder called {target} and a file called {name}. Afterwards both"
            f" places should have {name}: here as it is now, and an equal copy inside {target}."
        ),
        "setup": [folder(f"{DOCUMENTS}/{target}"), write(f"{DOCUMENTS}/{name}", text), show_folder(DOCUMENTS)],
        "checker": all_of(
            text_is(f"{DOCUMENTS}/{target}/{name}", text),
            text_is(f"{DOCUMENTS}/{name}", text),
            exactly(f"{DOCUMENTS}/{target}", name),
        ),
        "oracle": [
            NEW_TERMINAL,
            command(f"cp Documents/{name} Documents/{target}/", makes=f"{DOCUMENTS}/{target}/{name}"),
            DONE,
        ],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def who_wrote_most(rng: Sampler) -> Entry:
    """Answer from the content of a folder."""
    people = [name.lower() for name in rng.sample(NAMES, 3)]
    counts = rng.sample((4, 2, 3, 1, 5), 3)
    most = people[counts.index(max(counts))]
    letters = [
        write(f"{HOME}/Letters/{person}-{number}.txt", f"Dear all, this is letter {number}.\n")
        for person, count in zip(people, counts, strict=True)
        for number in range(1, count + 1)
    ]
    return {
        "tags": ["answer"],
        "instruction": (
            "Each file in the folder on the screen is a letter, and its name begins with the name of who wrote it."
            " Who wrote the most letters? Answer with that name."
        ),
        "setup": [*letters, show_folder(f"{HOME}/Letters")],
        "checker": {"kind": "answer", "equals": most, "case": "ignore"},
        "oracle": [[{"done": most.capitalize()}]],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def hidden_file(rng: Sampler) -> Entry:
    """Show hidden files, and answer with a name."""
    name = rng.choice(("treasure", "secret", "shadow", "whisper", "riddle", "mask", "cipher"))
    number = rng.randint(10, 99)
    return {
        "tags": ["answer"],
        "instruction": (
            "One file in the folder that the file manager displays stays out of sight, because its name begins with a"
            " dot. Make the file manager show hidden files and answer with that name, dot included."
        ),
        "setup": [
            write(f"{DOCUMENTS}/.{name}-{number}", "You found it.\n"),
            *(write(f"{DOCUMENTS}/{each.lower()}.txt", "In plain sight.\n") for each in rng.sample(CITIES, 3)),
            show_folder(DOCUMENTS),
        ],
        "checker": {"kind": "answer", "equals": f".{name}-{number}", "case": "ignore"},
        "oracle": [[{"press": ["ctrl", "h"]}], [{"done": f".{name}-{number}"}]],
    }
