"""Right and wrong states of results other than files: what commands print, and what windows and pages show.

See `tests.osworld.states`.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from tests.osworld.states import Rules, State, Unsupported, Value, Wanted, feeds, other, right

_SITE = "https://www.example.org"


def _rule(wanted: Wanted, key: str) -> Any:
    if key not in wanted.rule:
        raise Unsupported(f"rules without {key}")
    return wanted.rule[key]


def _of_pattern(pattern: str) -> str:
    """Return a text that a regular expression of OSWorld matches."""
    text = re.sub(r"\\(.)", r"\1", re.sub(r"\(\?:(.*?)\)|\.[*+]\??|\[\^.*?\]\+|\\[bs][*+]?", r"\1", pattern)).strip(
        "^$"
    )
    if not re.search(pattern, text):
        raise Unsupported("a pattern")
    return text


@feeds("exact_match")
def exact_values(wanted: Wanted) -> Iterator[State]:
    expected = _rule(wanted, "expected")
    if not isinstance(expected, str):
        raise Unsupported("not a text")
    wrong = {"true": "false", "false": "true"}.get(expected.strip(), other(expected))
    yield right(Value(expected))
    yield State("almost", "another value", Value(wrong))
    yield State("hedged", "two values", Value(f"{expected.strip()} or {wrong.strip()}\n"))
    yield State("lazy", "nothing", Value(""))
    yield State("planted", "the value in an error message", Value(f"bash: {expected.strip()}: command not found\n"))


@feeds("check_include_exclude", "is_extension_installed")
def outputs(wanted: Wanted) -> Iterator[State]:
    if wanted.rule.get("type") == "not_contain":
        raise Unsupported("an output without a text")
    text = "\n".join(wanted.rule.get("include") or [wanted.rule.get("expected", "")])
    yield right(Value(text))
    if not text:
        return
    yield State("almost", "one letter or digit differs", Value(other(text)))
    yield State("lazy", "nothing", Value(""))
    yield State("planted", "the text in an error message", Value(f"bash: {text}: command not found"))
    if wanted.function == "is_extension_installed":
        yield State("almost", "an extension with a longer name", Value(f"{text}-theme"))
    for excluded in wanted.rule.get("exclude", ())[:1]:
        yield State("hedged", "an excluded text, too", Value(f"{text}\n{excluded}"))


@feeds("is_in_list")
def entries(wanted: Wanted) -> Iterator[State]:
    expected = _rule(wanted, "expected")
    yield right(Value([expected]))
    yield State("almost", "one letter differs", Value([other(expected)]))
    yield State("lazy", "none", Value([]))


@feeds("is_expected_installed_extensions")
def extensions(wanted: Wanted) -> Iterator[State]:
    names = _rule(wanted, "expected")
    yield right(Value(names))
    yield State("almost", "the name of one differs", Value(other(names)))
    yield State("almost", "one is missing", Value(names[1:]))
    yield State("lazy", "none", Value([]))


@feeds("check_gnome_favorite_apps")
def favourites(wanted: Wanted) -> Iterator[State]:
    names = _rule(wanted, "expected")
    yield right(Value(repr(names)))
    yield State("almost", "another program in place of one", Value(repr(other(names))))
    yield State("damage", "all but one removed", Value(repr(names[:1])))
    yield State("hedged", "another program, too", Value(repr([*names, "vim.desktop"])))
    yield State("lazy", "an empty list", Value("@as []"))
    yield State("planted", "an expression instead of a list", Value(f"(lambda: {names!r})()"))


@feeds("check_text_enlarged")
def scaling_factors(_: Wanted) -> Iterator[State]:
    yield right(Value("1.5\n"))
    yield State("almost", "the default", Value("1.0\n"))
    yield State("almost", "larger by a thousandth", Value("1.001\n"))
    yield State("lazy", "nothing", Value(""))


@feeds("is_utc_0")
def time_zones(_: Wanted) -> Iterator[State]:
    def status(zone: str) -> Value:
        head = "Local time: Thu 2024-01-25 12:56:06\nUniversal time: Thu 2024-01-25 12:56:06 UTC\n"
        return Value(f"{head}RTC time: Thu 2024-01-25 12:56:05\nTime zone: {zone}\nNTP service: inactive\n")

    yield right(status("Etc/UTC (UTC, +0000)"))
    yield State("almost", "an hour later", status("Europe/Berlin (CET, +0100)"))
    yield State("lazy", "nothing", Value(""))


@feeds("is_expected_active_tab")
def active_tabs(wanted: Wanted) -> Iterator[State]:
    url = _rule(wanted, "url")
    yield right(Value(url))
    yield State("almost", "one letter of the address differs", Value(other(url)))
    yield State("almost", "a page below it", Value(f"{url.rstrip('/')}/other"))
    yield State("almost", "the page of another site", Value(re.sub(r"//[^/]*", "//example.org", url)))
    yield State("lazy", "an empty tab", Value("chrome://newtab/"))
    yield State("planted", "a parameter of another site", Value(f"{_SITE}/?{url}"))


@feeds("is_expected_url_pattern_match")
def addresses(wanted: Wanted) -> Iterator[State]:
    patterns = _rule(wanted, "expected")
    words = [_of_pattern(pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
    yield right(Value(f"{_SITE}{''.join(words)}"))
    yield State("almost", "one letter of the address differs", Value(f"{_SITE}{''.join(other(words))}"))
    yield State("lazy", "an empty tab", Value("chrome://newtab/"))
    yield State(
        "planted", "words to search for, at a search engine", Value(f"https://duckduckgo.com/?q={' '.join(words)}")
    )


@feeds("is_expected_search_query")
def searches(wanted: Wanted) -> Iterator[State]:
    url = f"https://{_of_pattern(_rule(wanted, 'expect')['pattern'])}"
    yield right(Value({"url": url}))
    yield State("almost", "one letter differs", Value({"url": other(url)}))
    yield State("planted", "a parameter of another site", Value({"url": f"{_SITE}/?{url}"}))


@feeds("is_expected_tabs")
def tabs(wanted: Wanted) -> Iterator[State]:
    def opened(urls: Sequence[str]) -> Value:
        return Value([{"title": "", "url": url} for url in urls])

    urls = _rule(wanted, "urls")
    yield right(opened(urls))
    yield State("almost", "one letter of an address differs", opened(other(urls)))
    yield State("almost", "a tab is missing", opened(urls[1:]))
    yield State("hedged", "another tab, too", opened([*urls, f"{_SITE}/"]))
    yield State("lazy", "an empty tab", opened(["chrome://newtab/"]))


@feeds("is_added_to_steam_cart")
def carts(wanted: Wanted) -> Iterator[State]:
    items = _rule(wanted, "items")
    text = " ".join(items)
    yield right(Value({"content": f"<h1>Your cart</h1>{text}"}))
    yield State("almost", "another item", Value({"content": f"<h1>Your cart</h1>{other(text)}"}))
    yield State(
        "almost", "the empty cart, which recommends it", Value({"content": f"<h1>Your cart is empty</h1>{text}"})
    )
    yield State("lazy", "the empty cart", Value({"content": "<h1>Your cart is empty</h1>"}))


@feeds("check_direct_json_object")
def objects(wanted: Wanted) -> Iterator[State]:
    expected: Rules = {
        # With this option a list has the words that may be there.
        key: value[0] if isinstance(value, list) and value and wanted.rule.get("expect_in_result") else value
        for key, value in _rule(wanted, "expected").items()
    }
    yield right(Value(expected))
    yield State("almost", "other values", Value(other(expected)))
    for key, value in list(expected.items())[:1]:
        yield State("almost", "the first value differs", Value({**expected, key: other(value)}))
        if isinstance(value, str):
            yield State(
                "hedged", "two values in place of the first", Value({**expected, key: f"{value} or {other(value)}"})
            )
    yield State("lazy", "no values", Value(dict.fromkeys(expected, "")))


@feeds("check_list")
def lines(wanted: Wanted) -> Iterator[State]:
    found = [_of_pattern(pattern) for pattern in wanted.rule.get("expect", ())]
    refused = [_of_pattern(pattern) or "x" for pattern in wanted.rule.get("unexpect", ()) if pattern != ".+"]
    yield right("".join(f"{line}\n" for line in found).encode())
    if found:
        yield State("almost", "one letter of each line differs", "".join(f"{other(line)}\n" for line in found).encode())
        yield State("almost", "a line is missing", "".join(f"{line}\n" for line in found[1:]).encode())
        longer = "".join(f"not {line}\n" for line in found)
        yield State("hedged", "the lines with a word in front of them", longer.encode())
    else:
        yield State("almost", "a line is left", b"x\n")
    for line in refused[:1]:
        yield State("hedged", "a refused line, too", "".join(f"{each}\n" for each in [*found, line]).encode())


@feeds("check_csv")
def records(wanted: Wanted) -> Iterator[State]:
    def table(rows: Sequence[Rules]) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(text, sorted({key for row in rows for key in row} or {"url"}))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()

    wrong = wanted.rule.get("unexpect", [])
    expected = wanted.rule.get("expect", [])
    names = {"url": "https://example.org", "user": "ada", "username": "ada", "password": "x"}
    kept = {key: names.get(key, "x") for row in [*expected, *wrong] for key in row}
    yield right(table([kept, *expected]))
    if expected:
        yield State("almost", "other values", table([kept, *(other(row) for row in expected)]))
        yield State("damage", "all other records deleted", table(expected))
        yield State("hedged", "a second record with other values", table([kept, *expected, *(map(other, expected))]))
        yield State("lazy", "no such record", table([kept]))
    for row in wrong[:1]:
        yield State("almost", "a refused record is left", table([kept, *expected, row]))
        yield State("damage", "all records deleted", table([dict.fromkeys(kept, "")]))


@feeds("check_left_panel")
def panels(_: Wanted) -> Iterator[State]:
    def tree(*names: str, application: str = "soffice") -> Value:
        shown = "".join(f'<document-frame name="{name}"/>' for name in names)
        return Value(f'<desktop-frame><application name="{application}">{shown}</application></desktop-frame>')

    yield right(tree("PDF Export", "Slides View"))
    yield State("almost", "another panel", tree("Notes View"))
    yield State("lazy", "no panel", tree())
    yield State("planted", "a document of this name in another program", tree("Slides View", application="Chromium"))


@feeds("is_vlc_playing")
def players(wanted: Wanted) -> Iterator[State]:
    kind = _rule(wanted, "type")
    expected = _rule(wanted, kind)

    def status(name: str, *, state: str = "playing") -> bytes:
        info = f'<info name="{"filename" if kind == "file_name" else "url"}">{escape(name)}</info>'
        meta = f'<information><category name="meta">{info}</category></information>'
        return f"<root><state>{state}</state>{meta}</root>".encode()

    yield right(status(expected))
    yield State("almost", "paused", status(expected, state="paused"))
    yield State("almost", "one letter of the name differs", status(other(expected)))
    if kind == "file_name":
        yield State("almost", "a file with a longer name", status(f"Not {expected}"))
    else:
        yield State("planted", "a parameter of another address", status(f"{_SITE}/?{expected}"))
    yield State("early", "stopped at the end", b"<root><state>stopped</state></root>")
