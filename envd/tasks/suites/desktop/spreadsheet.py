"""Templates about the spreadsheet. The saved file is compared by the values of its cells."""

from envd.tasks.suites.desktop.parts import (
    DESKTOP,
    DOCUMENTS,
    DONE,
    GOODS,
    NAMES,
    SAVE,
    TOOLS,
    Step,
    Verb,
    lines,
    repeat,
    write,
)
from envd.tasks.templates import Entry, Sampler

_DOMAIN = "spreadsheet"
_PATH = f"{DOCUMENTS}/table.gnumeric"
_CSV = "Gnumeric_stf:stf_csv"

Row = tuple[object, ...]


def _open_sheet(*rows: Row) -> list[Verb]:
    return [
        write("/tmp/table.csv", _text(rows)),  # noqa: S108 -- in the guest
        {"kind": "make_directory", "path": DOCUMENTS},
        {"kind": "execute", "argv": ["ssconvert", "/tmp/table.csv", _PATH], "unless": ["test", "-e", _PATH]},  # noqa: S108
        # The splash screen would take the keyboard focus.
        {
            "kind": "launch",
            "argv": ["gnumeric", "--no-splash", _PATH],
            "window": {"title": r"table\.gnumeric", "class": "gnumeric"},
        },
    ]


def _sheet_is(*rows: Row) -> Verb:
    return {
        "kind": "command",
        "argv": ["ssconvert", "-T", _CSV, _PATH, "fd://1"],
        "stdout": {"equals": _text(rows)},
        "timeout_s": 90,
    }


def _text(rows: tuple[Row, ...]) -> str:
    return lines(*(",".join(map(str, row)) for row in rows))


def _go_to(row: int, column: str) -> Step:
    """Go to a cell with the arrow keys, from A1, where the sheet opens."""
    return [*repeat("down", row - 1), *repeat("right", ord(column) - ord("A"))]


def _ledger(rng: Sampler, count: int) -> list[tuple[str, int, int]]:
    return [(item, rng.randint(2, 60), rng.randint(3, 25)) for item in rng.sample((*TOOLS, *GOODS), count)]


_HEAD: Row = ("Item", "Price", "Count")


@DESKTOP.add(level=2, domain=_DOMAIN)
def fill_missing_price(rng: Sampler) -> Entry:
    """Type a number into an empty cell."""
    ledger = _ledger(rng, 4)
    place = rng.choice((1, 0, 2, 3))
    item, price, count = ledger[place]
    return {
        "instruction": (
            f'In the spreadsheet table.gnumeric, which is open, the price of "{item}" is missing. It is {price}: enter'
            " it and save the file."
        ),
        "setup": _open_sheet(_HEAD, *ledger[:place], (item, "", count), *ledger[place + 1 :]),
        "checker": _sheet_is(_HEAD, *ledger),
        "oracle": [_go_to(place + 2, "B"), [{"type": f"{price}\n"}], SAVE, DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def correct_a_name(rng: Sampler) -> Entry:
    """Overwrite a cell."""
    wrong, right = rng.sample(NAMES[:-3], 2)
    days = [(f"Week-{rng.randint(1, 50) + n}", rng.choice(GOODS)) for n in range(3)]
    place = rng.choice((0, 1, 2))
    rows = [(name, *day) for name, day in zip(NAMES[-3:], days, strict=True)]
    return {
        "instruction": (
            f"The duty roster in the spreadsheet says {wrong} in column A, but it is {right} who is on duty. Put the"
            " right name in that cell, change nothing else, and save."
        ),
        "setup": _open_sheet(("Name", "When", "Brings"), *_with_name(rows, place, wrong)),
        "checker": _sheet_is(("Name", "When", "Brings"), *_with_name(rows, place, right)),
        "oracle": [repeat("down", place + 1), [{"type": f"{right}\n"}], SAVE, DONE],
    }


def _with_name(rows: list[tuple[str, str, str]], place: int, name: str) -> list[Row]:
    return [(name, *row[1:]) if n == place else row for n, row in enumerate(rows)]


@DESKTOP.add(level=2, domain=_DOMAIN)
def dearest_article(rng: Sampler) -> Entry:
    """Answer from a table."""
    items = rng.sample((*TOOLS, *GOODS), 6)
    prices = rng.sample(range(11, 98), 6)
    dearest = items[prices.index(max(prices))]
    return {
        "tags": ["answer"],
        "instruction": (
            "Look at the price list in the open spreadsheet. Which article costs the most? Answer with its name as it"
            " is written there."
        ),
        "setup": _open_sheet(("Article", "Euro"), *zip(items, prices, strict=True)),
        "checker": {"kind": "answer", "equals": dearest, "case": "ignore"},
        "oracle": [[{"done": dearest}]],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def add_a_row(rng: Sampler) -> Entry:
    """Add a row below the others."""
    *ledger, new = _ledger(rng, 4)
    item, price, count = new
    return {
        "instruction": (
            f"A delivery came in: {count} pieces of {item} at a price of {price} each. Enter it as a new row right"
            " under the last one of the inventory on the screen, in the same columns, and save the workbook."
        ),
        "setup": _open_sheet(_HEAD, *ledger),
        "checker": _sheet_is(_HEAD, *ledger, new),
        "oracle": [_go_to(5, "A"), [{"type": f"{item}\t{price}\t{count}\n"}], SAVE, DONE],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def total_of_a_column(rng: Sampler) -> Entry:
    """Add up a column with a formula."""
    ledger = _ledger(rng, 5)
    total = sum(count for _, _, count in ledger)
    return {
        "tags": ["formula"],
        "instruction": (
            "Let the spreadsheet add up the numbers in column C: the sum belongs into cell C7, directly below them."
            " Then save. Nothing else in the sheet may change."
        ),
        "setup": _open_sheet(_HEAD, *ledger),
        "checker": _sheet_is(_HEAD, *ledger, ("", "", total)),
        "oracle": [_go_to(7, "C"), [{"type": "=SUM(C2:C6)\n"}], SAVE, DONE],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def highest_and_lowest(rng: Sampler) -> Entry:
    """Use two functions of the spreadsheet."""
    # All different, so that the highest is not also the lowest.
    degrees = rng.sample(range(-9, 32), 6)
    days = list(enumerate(degrees, start=1))
    return {
        "tags": ["formula"],
        "instruction": (
            "Six days of temperatures are in B2 to B7. Show the highest of them in cell D1 and the lowest in cell D2,"
            " and keep the result by saving."
        ),
        "setup": _open_sheet(("Day", "Degrees"), *days),
        "checker": _sheet_is(
            ("Day", "Degrees", "", max(degrees)),
            (*days[0], "", min(degrees)),
            *((day, degree, "", "") for day, degree in days[1:]),
        ),
        "oracle": [_go_to(1, "D"), [{"type": "=MAX(B2:B7)\n=MIN(B2:B7)\n"}], SAVE, DONE],
    }


@DESKTOP.add(level=4, domain=_DOMAIN)
def value_of_the_stock(rng: Sampler) -> Entry:
    """Fill a column with products, and their sum below."""
    ledger = _ledger(rng, 3)
    values = [price * count for _, price, count in ledger]
    return {
        "tags": ["formula"],
        "instruction": (
            'What is the stock worth? Head column D with the word "Value", give every article its price times its count'
            " there, and put the sum of these values into D5, under the last one. Save the table when it is complete."
        ),
        "setup": _open_sheet(_HEAD, *ledger),
        "checker": _sheet_is(
            (*_HEAD, "Value"),
            *((*row, value) for row, value in zip(ledger, values, strict=True)),
            ("", "", "", sum(values)),
        ),
        "oracle": [_go_to(1, "D"), [{"type": "Value\n=B2*C2\n=B3*C3\n=B4*C4\n=SUM(D2:D4)\n"}], SAVE, DONE],
    }
