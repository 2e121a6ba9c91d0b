"""Templates about the text editor."""

from importlib.resources import files

from envd.tasks.suites.desktop.parts import (
    CITIES,
    COLOURS,
    DESKTOP,
    DOCUMENTS,
    DONE,
    GOODS,
    NAMES,
    SAVE,
    TOOLS,
    WEEKDAYS,
    all_of,
    edit,
    empty_editor,
    lines,
    repeat,
    save_as,
    text_is,
    until_window,
    write,
)
from envd.tasks.templates import Entry, Sampler

_DOMAIN = "editor"
_MANUAL = (files("envd.tasks") / "suites/desktop/manual.txt").read_text(encoding="utf-8")


@DESKTOP.add(level=1, domain=_DOMAIN)
def type_greeting(rng: Sampler) -> Entry:
    """Type one line into an empty document."""
    path = f"{DOCUMENTS}/greeting.txt"
    greeting = rng.choice(("Hello", "Welcome", "Good morning", "Good evening", "Many thanks", "See you soon"))
    text = f"{greeting}, {rng.choice(('desktop', 'neighbours', 'everyone', *NAMES, *CITIES))}{rng.choice('!.')}"
    return {
        "tags": ["typing"],
        "instruction": (
            "A text document named greeting.txt is open in the editor and empty. Type exactly this line into it and"
            f" save the document: {text}"
        ),
        "setup": [write(path, ""), edit(path)],
        "checker": text_is(path, text),
        "oracle": [[{"type": text}], SAVE, DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def save_shopping_list(rng: Sampler) -> Entry:
    """Write a list and save it under a name."""
    items = rng.sample(GOODS, 3)
    name = rng.choice(("shopping", "groceries", "errands", "market", "saturday", "weekend", "pantry", "kitchen"))
    path = f"{DOCUMENTS}/{name}.txt"
    return {
        "tags": ["typing", "dialog"],
        "instruction": (
            "The editor shows an empty, unnamed document. Write a shopping list of three lines into it"
            f" ({items[0]}, then {items[1]}, then {items[2]}) and save it as {name}.txt in the Documents folder of the"
            " home directory."
        ),
        "setup": [{"kind": "make_directory", "path": DOCUMENTS}, empty_editor()],
        "checker": text_is(path, lines(*items)),
        "oracle": [[{"type": lines(*items)}], *save_as(path), DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def change_weekday(rng: Sampler) -> Entry:
    """Replace one word in the middle of a line."""
    path = f"{DOCUMENTS}/meeting.txt"
    old, new = rng.sample(WEEKDAYS, 2)
    rest = f"at {rng.randint(10, 17)}:00 in room {rng.randint(4, 99)}.\nBring your notes.\n"
    return {
        "tags": ["editing"],
        "instruction": (
            f"The document meeting.txt is open in the editor. The meeting was moved: change the word {old} to {new},"
            " leave everything else as it is, and save."
        ),
        "setup": [write(path, f"Team meeting\nWe meet on {old} {rest}"), edit(path)],
        "checker": text_is(path, f"Team meeting\nWe meet on {new} {rest}"),
        "oracle": [
            [{"press": ["ctrl", "home"]}, {"press": "down"}, *[{"press": ["ctrl", "right"]}] * 3, {"press": "right"}],
            [{"press": ["ctrl", "shift", "right"]}, {"type": new}],
            SAVE,
            DONE,
        ],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def delete_line(rng: Sampler) -> Entry:
    """Remove one of several lines."""
    path = f"{DOCUMENTS}/guests.txt"
    guests = sorted(rng.sample(NAMES, 5))
    place = rng.choice((3, 0, 1, 2, 4))
    leaves = guests[place]
    return {
        "tags": ["editing"],
        "instruction": (
            f"The document guests.txt, open in the editor, lists one guest per line. {leaves} cannot come: remove that"
            " line, leaving no empty line behind, and save."
        ),
        "setup": [write(path, lines(*guests)), edit(path)],
        "checker": text_is(path, lines(*(guest for guest in guests if guest != leaves))),
        "oracle": [
            [{"press": ["ctrl", "home"]}, *repeat("down", place)],
            [{"press": ["ctrl", "shift", "delete"]}],
            SAVE,
            DONE,
        ],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def append_line(rng: Sampler) -> Entry:
    """Add a line at the end."""
    path = f"{DOCUMENTS}/log.txt"
    log = lines("22:00 all quiet", f"23:{rng.randint(30, 59)} door {rng.randint(2, 9)} checked", "01:15 alarm tested")
    who = rng.choice(("the night shift", "the front desk", *NAMES))
    line = f"{rng.choice(('Reviewed', 'Signed', 'Read', 'Approved'))} by {who}"
    return {
        "tags": ["editing"],
        "instruction": (
            f'Add the line "{line}" to the end of the document log.txt, which is open in the editor, and save it. Lines'
            " that are already there must stay."
        ),
        "setup": [write(path, log), edit(path)],
        "checker": text_is(path, f"{log}{line}\n"),
        "oracle": [[{"press": ["ctrl", "end"]}], [{"type": f"{line}\n"}], SAVE, DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def insert_heading(rng: Sampler) -> Entry:
    """Insert a first line."""
    path = f"{DOCUMENTS}/{rng.choice(('recipe', 'story', 'route', 'letter', 'speech'))}.txt"
    name = path.rpartition("/")[2]
    body = lines(
        f"From {rng.choice(CITIES)} it takes {rng.randint(2, 9)} hours.",
        f"Take the {rng.choice(COLOURS)} line.",
        "Keep the ticket.",
    )
    heading = f"{rng.choice(('Notes for', 'Sent to', 'Copy for', 'Written by'))} {rng.choice(NAMES)}"
    return {
        "tags": ["editing"],
        "instruction": (
            f'Give the text in {name}, which you see in the editor, a new first line: "{heading}". The old first line'
            " then comes second. Save the file."
        ),
        "setup": [write(path, body), edit(path)],
        "checker": text_is(path, f"{heading}\n{body}"),
        "oracle": [[{"press": ["ctrl", "home"]}], [{"type": f"{heading}\n"}], SAVE, DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def type_unicode(rng: Sampler) -> Entry:
    """Type letters from several alphabets."""
    path = f"{DOCUMENTS}/prices.txt"
    dish = rng.choice(
        ("Café crème", "Crème brûlée", "Smørrebrød", "Käsespätzle", "Žganci", "Ħobż", "Gözleme", "Phở bò")
    )
    word = rng.choice(("naïve", "Übermut", "señora", "façade", "brâncuși", "łódka"))
    sign = rng.choice(("漢字", "ελιά", "мёд", "ゆず", "쌀", "שקד"))
    line = f"{dish} {rng.randint(3, 19)},{rng.randint(5, 9)}0 € · {word} · {sign}"
    return {
        "tags": ["typing", "unicode"],
        "instruction": (
            "The document prices.txt is open in the editor and empty. Type this line into it, character for character,"
            f" and save: {line}"
        ),
        "setup": [write(path, ""), edit(path)],
        "checker": text_is(path, line),
        "oracle": [[{"type": line}], SAVE, DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def read_access_code(rng: Sampler) -> Entry:
    """Find a line below the visible part of a document."""
    path = f"{DOCUMENTS}/manual.txt"
    flower = rng.choice(("TULIP", "DAISY", "LOTUS", "POPPY", "ASTER", "LILAC"))
    code = f"{rng.randint(7, 99)}-{flower}-{rng.randint(42, 99)}"
    days = [f"{day:<10} {rng.randint(6, 8)}:00 to {rng.randint(17, 21)}:00" for day in WEEKDAYS]
    manual = _MANUAL.format(days="\n".join(days), code=code)
    return {
        "tags": ["mouse", "answer"],
        "instruction": (
            "The document manual.txt is open in the editor. Somewhere below what the window shows, a line begins with"
            ' "Access code:". Scroll there and answer with the code.'
        ),
        "setup": [write(path, manual), edit(path)],
        "checker": {"kind": "answer", "equals": code, "case": "ignore"},
        "oracle": [[{"scroll": {"x": 460, "y": 400, "dy": 20}}], [{"done": code}]],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def replace_everywhere(rng: Sampler) -> Entry:
    """Replace all occurrences of a word, with the editor's dialog."""
    path = f"{DOCUMENTS}/palette.txt"
    old, new = rng.choice((("grey", "gray"), ("teal", "cyan"), ("plum", "wine"), ("rust", "clay"), ("mint", "jade")))
    first, second, third = rng.sample(("slate", "dove", "charcoal", "smoke", "ash", "storm", "mist"), 3)
    text = lines(f"{first} {old}, {second} {old}", "silver", f"{old}ish blue", f"white, {old}, black", f"{third} {old}")
    return {
        "tags": ["dialog"],
        "instruction": (
            f'In the document palette.txt, which is open in the editor, replace every "{old}" by "{new}", also inside'
            " longer words, and save. The dialog Find and Replace in the Search menu helps."
        ),
        "setup": [write(path, text), edit(path)],
        "checker": text_is(path, text.replace(old, new)),
        "oracle": [
            [{"press": ["ctrl", "r"]}, until_window("Find and Replace")],
            [{"type": f"{old}\t{new}"}],
            [{"press": ["alt", "a"]}],
            [{"press": ["alt", "r"]}],
            [{"press": "escape"}, until_window("Find and Replace", absent=True)],
            SAVE,
            DONE,
        ],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def uppercase_by_menu(rng: Sampler) -> Entry:
    """Change the case of a whole document."""
    path = f"{DOCUMENTS}/sign.txt"
    animal = rng.choice(("cat", "dog", "parrot", "rabbit", "goat", "turtle", "hen"))
    who = rng.choice(("neighbours", "gardeners", "owners", "caretakers", "children"))
    thing = rng.choice(("door", "gate", "window", "hatch", "lid"))
    text = lines(f"please keep this {thing} closed", f"the {animal} must stay inside", f"thank you, the {who}")
    return {
        "tags": ["menu"],
        "instruction": (
            "The document sign.txt is open in the editor. Turn its whole text into capital letters (the Edit menu has"
            " Convert) and save it."
        ),
        "setup": [write(path, text), edit(path)],
        "checker": text_is(path, text.upper()),
        "oracle": [
            [{"press": ["ctrl", "a"]}],
            [{"press": ["alt", "e"]}],
            [{"press": "r"}],
            [{"press": "u"}],
            SAVE,
            DONE,
        ],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def move_line_to_end(rng: Sampler) -> Entry:
    """Cut a line and paste it elsewhere."""
    path = f"{DOCUMENTS}/order-of-work.txt"
    steps = [f"{rng.choice(('Fetch', 'Clean', 'Oil', 'Check'))} the {tool.lower()}" for tool in rng.sample(TOOLS, 5)]
    place = rng.choice((1, 0, 2, 3))
    moved = steps[place]
    return {
        "tags": ["editing", "clipboard"],
        "instruction": (
            f'The steps in order-of-work.txt are out of order: "{moved}" has to be the last one. Move it there in the'
            " editor, keep the others as they stand, leave no gap, and save."
        ),
        "setup": [write(path, lines(*steps)), edit(path)],
        "checker": text_is(path, lines(*steps[:place], *steps[place + 1 :], moved)),
        "oracle": [
            [{"press": ["ctrl", "home"]}, *repeat("down", place)],
            [{"press": ["shift", "down"]}, {"press": ["ctrl", "x"]}],
            [{"press": ["ctrl", "end"]}, {"press": ["ctrl", "v"]}],
            SAVE,
            DONE,
        ],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def keep_a_copy(rng: Sampler) -> Entry:
    """Change a document and save the change under another name only."""
    month = rng.choice(("march", "april", "june", "august", "october", "december"))
    old, new = f"{DOCUMENTS}/plan.txt", f"{DOCUMENTS}/plan-{month}.txt"
    text = lines(f"Budget: {rng.randint(200, 950)}", f"Place: {rng.choice(CITIES)}")
    extra = f"Guide: {rng.choice(NAMES)}"
    return {
        "tags": ["editing", "dialog"],
        "instruction": (
            f'Make a second version of plan.txt, the file in the editor: add "{extra}" as its last line and store that'
            f" as plan-{month}.txt in the same folder. What plan.txt holds on disk must not change."
        ),
        "setup": [write(old, text), edit(old)],
        "checker": all_of(text_is(new, f"{text}{extra}\n"), text_is(old, text)),
        "oracle": [[{"press": ["ctrl", "end"]}], [{"type": f"{extra}\n"}], *save_as(new), DONE],
    }
