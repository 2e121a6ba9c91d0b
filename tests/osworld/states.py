"""Right and wrong states of the results that OSWorld's metric functions read: texts and settings.

A maker is called with the rules, options and name of a result. It yields the expected file if the function has one,
then a right state, and then wrong ones. All contents are made up: only rules come from the task files.
"""

import datetime
import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

Rules = dict[str, Any]
#: A file, several files, or in a `Value` what the getter returns.
Content = Any


class Unsupported(Exception):
    """The maker has no state for these rules."""


class Value(NamedTuple):
    """What a getter returns that is not a file."""

    value: Any


class State(NamedTuple):
    """A state of the results of a task."""

    kind: str
    """`gold`, `right`, or the kind of wrong state."""
    name: str
    """How it differs from the right one."""
    content: Content


class Wanted(NamedTuple):
    """What a task asks of the result."""

    function: str
    rules: Sequence[Rules]
    """Rules of all functions that read the result."""
    options: Rules
    name: str
    """Its file name; empty for a value."""

    @property
    def rule(self) -> Rules:
        return self.rules[-1]


Maker = Callable[[Wanted], Iterator[State]]
MAKERS: dict[str, Maker] = {}


def feeds(*functions: str) -> Callable[[Maker], Maker]:
    """Register the maker of these functions."""

    def register(maker: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(functions, maker))
        return maker

    return register


def gold(content: Content) -> State:
    return State("gold", "", content)


def right(content: Content) -> State:
    return State("right", "the goal", content)


def states_of(wanted: Wanted) -> list[State]:
    """Return the states of a result, without those that equal the right one. Raises: Unsupported."""
    if wanted.function not in MAKERS:
        raise Unsupported(f"no maker for {wanted.function}")
    states = list(MAKERS[wanted.function](wanted))
    goal = next(state.content for state in states if state.kind == "right")
    if isinstance(goal, bytes):
        states.append(State("lazy", "an empty file with the right name", b""))
    return [state for state in states if state.kind in {"gold", "right"} or state.content != goal]


def other(value: Any) -> Any:
    """Return a value that differs a little."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str() if value:
            # The last letter or digit. Punctuation may be without meaning.
            at = max((at for at, letter in enumerate(value) if letter.isalnum()), default=len(value) - 1)
            return value[:at] + ("x" if value[at] != "x" else "y") + value[at + 1 :]
        case dict():
            return {key: other(part) for key, part in value.items()}
        case list() if value:
            return [*value[:-1], other(value[-1])]
    return "x"


_SOURCE = """def area(width, height):
    # In square metres.
    return width * height


def names():
    return "a\tb"


print(area(3, 12))
"""


@feeds("compare_text_file", "diff_text_file", "compare_python_pure_text", "compare_config")
def texts(wanted: Wanted) -> Iterator[State]:
    text = wanted.rule.get("expected", _SOURCE)
    lines = text.splitlines(keepends=True)
    yield gold(text.encode())
    yield right(text.encode())
    yield State("almost", "one letter or digit differs", other(text).encode())
    yield State("hedged", "another text after the right one", (text + "or\n" + other(text)).encode())
    yield State("planted", "three million lines", b"a\n" * 3_000_000)
    if len(lines) > 1:
        yield State("almost", "a line is missing", "".join(lines[:-1]).encode())
        yield State("damage", "lines in reverse order", "".join(reversed(lines)).encode())
        yield State("early", "all but the first line deleted afterwards", lines[0].encode())
    if wanted.function == "compare_python_pure_text":
        yield State("almost", "a tab in a string became blanks", text.replace("\t", "   ").encode())


@feeds("file_contains", "check_line_number")
def reports(wanted: Wanted) -> Iterator[State]:
    words = next((rule["expected"] for rule in wanted.rules if isinstance(rule["expected"], list)), ["CPU"])
    count = next((int(rule["expected"]) for rule in wanted.rules if isinstance(rule["expected"], str)), 31)
    head = "10:00:00 " + " ".join(words)
    rows = [f"10:00:{second:02} all " + " ".join("1.5" for _ in words[1:]) for second in range(1, count)]
    yield right("\n".join([head, *rows, ""]).encode())
    yield State("almost", "a measurement is missing", "\n".join([head, *rows[:-1], ""]).encode())
    yield State("almost", "a heading differs", "\n".join([other(head), *rows, ""]).encode())
    yield State("lazy", "headings and times without a measurement", "\n".join([head] * count).encode())
    yield State("early", "all values deleted afterwards", "\n".join([head, *(row[:8] for row in rows)]).encode())


@feeds("compare_result_files")
def numbers(_: Wanted) -> Iterator[State]:
    yield gold(b"47.5\n")
    yield right(b"47.5\n")
    yield State("almost", "one digit more in front: 147.5", b"147.5\n")
    yield State("almost", "one digit differs", b"47.6\n")
    yield State("hedged", "two numbers", b"12.25 or 47.5\n")


@feeds("compare_time_in_speedtest_results")
def speed_tests(_: Wanted) -> Iterator[State]:
    now = datetime.datetime.now(datetime.UTC)
    yesterday = now - datetime.timedelta(days=1)
    head = "Conn,Date,Ping,Download,Upload\n"
    yield right(f"{head}wifi,{now:%m/%d/%Y %H:%M},11,93.5,20.1\n".encode())
    yield State("almost", "a result of yesterday", f"{head}wifi,{yesterday:%m/%d/%Y %H:%M},11,93.5,20.1\n".encode())
    yield State("lazy", "the time without a measurement", f"\n,{now:%H:%M}".encode())


@feeds("compare_csv")
def csv(_: Wanted) -> Iterator[State]:
    text = "Name,City,Amount\nAda,Berlin,12\nGrace,Paris,47\n"
    yield gold(text.encode())
    yield right(text.encode())
    yield State("almost", "one digit differs", text.replace("47", "48").encode())
    yield State("almost", "another separator", text.replace(",", ";").encode())
    yield State("hedged", "two values in a cell", text.replace("47", "47 or 48").encode())
    yield State("damage", "a row is missing", "".join(text.splitlines(keepends=True)[:2]).encode())


@feeds("check_json_settings")
def settings(wanted: Wanted) -> Iterator[State]:
    expected = wanted.rule["expected"]
    base = {"editor.fontSize": 14, "files.autoSave": "off"}
    own = {**base, **expected}
    yield right(_json(own))
    yield State("almost", "another value", _json({**base, **other(expected)}))
    yield State("almost", "the values as text", _json({**base, **{key: str(value) for key, value in expected.items()}}))
    yield State("damage", "all other settings deleted", _json(expected))
    pairs = [*base.items(), *expected.items(), *other(expected).items()]
    text = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in pairs)
    yield State("early", "set, and set again to another value", f"{{{text}}}".encode())
    yield State("hedged", "for one language only", _json({**base, "[python]": expected}))
    yield State("planted", "lists nested a hundred thousand deep", b"[" * 100_000)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


@feeds("check_json_keybindings")
def keybindings(wanted: Wanted) -> Iterator[State]:
    expected = wanted.rule["expected"]
    base = {"key": "ctrl+alt+b", "command": "workbench.action.toggleSidebarVisibility"}
    yield right(_json([base, expected]))
    yield State("almost", "another key", _json([base, {**expected, "key": other(expected["key"])}]))
    yield State("damage", "all other shortcuts deleted", _json([expected]))
    opposite = expected["command"].removeprefix("-") if expected["command"].startswith("-") else "noop"
    later = {**expected, "command": opposite}
    yield State("early", "a later entry for the key undoes it", _json([base, expected, later]))
    yield State("hedged", "only with a condition more", _json([base, {**expected, "when": "false"}]))


@feeds("check_json")
def documents(wanted: Wanted) -> Iterator[State]:
    own: Any = {"other": "kept"}
    wrong: Any = {"other": "kept"}
    bare: Any = {}
    for each in wanted.rule.get("expect", []):
        value = _matching(each)
        for tree, put in ((own, value), (wrong, other(value)), (bare, value)):
            _put(tree, each["key"], put)
    # JSON is YAML, too.
    yield right(_json(own))
    yield State("almost", "other values", _json(wrong))
    yield State("damage", "everything else deleted", _json(bare))
    yield State("planted", "lists nested a hundred thousand deep", b"[" * 100_000)


def _put(tree: Any, keys: Sequence[Any], value: Any) -> None:
    if any(not isinstance(key, str) for key in keys):
        raise Unsupported("an index in a key")
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _matching(rule: Rules) -> Any:
    """Return a value that a rule of OSWorld matches."""
    if not rule["method"].startswith("re"):
        return rule["ref"]
    value = rule["ref"].replace("\\b", "").replace(".+", "<br>").replace("\\.", ".").strip("^$")
    if not re.search(rule["ref"], value):
        raise Unsupported("a pattern")
    return value


@feeds("check_thunderbird_prefs")
def preferences(wanted: Wanted) -> Iterator[State]:
    base = 'user_pref("mail.spellcheck.inline", true);\n'
    expected = {key: _matching(rule) for key, rule in wanted.rule.get("expect", {}).items()}
    excluded = {key: other(rule["ref"]) for key, rule in wanted.rule.get("unexpect", {}).items()}

    def lines(values: Rules) -> str:
        return "".join(f'user_pref("{key}", {json.dumps(value)});\n' for key, value in values.items())

    own = {**expected, **excluded}
    yield right((base + lines(own)).encode())
    yield State("almost", "other values", (base + lines(other(own))).encode())
    yield State("damage", "all other preferences deleted", lines(own).encode())
    yield State("early", "set, and set again to other values", (base + lines(own) + lines(other(own))).encode())
    commented = "".join(f"// {line}\n" for line in lines(own).splitlines())
    yield State("planted", "in comments only", (base + commented).encode())
    if any(".+" in str(rule["ref"]) for rule in wanted.rule.get("expect", {}).values()):
        longer = {key: str(value).replace("<br>", " has never been at ") for key, value in own.items()}
        yield State("hedged", "other words between the expected ones", (base + lines(longer)).encode())


@feeds("check_thunderbird_filter")
def filters(wanted: Wanted) -> Iterator[State]:
    def block(values: Rules) -> str:
        fields = {"name": "new", "enabled": "yes", "type": "17", **values}
        condition = " ".join(fields.pop("condition"))
        text = "".join(f'{key}="{value}"\n' for key, value in fields.items())
        return f'{text}condition="{condition}"\n'

    head = 'version="9"\nlogging="no"\n'
    old = block({"name": "old", "action": "Mark flagged", "condition": ["AND (subject,contains,urgent)"]})
    expected = "".join(block(each) for each in wanted.rule["expect"])
    changed = "".join(block({**each, "actionValue": other(each["actionValue"])}) for each in wanted.rule["expect"])
    undone = "".join(block({**each, "action": "Delete", "actionValue": ""}) for each in wanted.rule["expect"])
    yield right((head + old + expected).encode())
    yield State("almost", "another target", (head + old + changed).encode())
    yield State("almost", "not enabled", (head + old + expected.replace('enabled="yes"', 'enabled="no"')).encode())
    yield State("damage", "the other filter deleted", (head + expected).encode())
    yield State("hedged", "a second filter deletes the same mails", (head + old + undone + expected).encode())


@feeds("check_thunderbird_folder")
def mail_folders(_: Wanted) -> Iterator[State]:
    def mails(*subjects: str) -> bytes:
        return "".join(
            f"From - Mon Jan  1 10:00:00 2024\nX-Mozilla-Status: 0001\nSubject: {each}\n\nText.\n\n"
            for each in subjects
        ).encode()

    yield gold(mails("Bill 1", "Bill 2"))
    yield right(mails("Bill 1", "Bill 2"))
    yield State("almost", "a subject differs", mails("Bill 1", "Bill 3"))
    yield State("damage", "a mail is missing", mails("Bill 1"))
    yield State("lazy", "another mail", mails("Lunch"))
    yield State("hedged", "mails of another folder, too", mails("Bill 1", "Bill 2", "Lunch"))


@feeds("run_sqlite3")
def databases(_: Wanted) -> Iterator[State]:
    def database(starred: Sequence[int], messages: Sequence[tuple[int, int]], script: str = "") -> bytes:
        connection = sqlite3.connect(":memory:")
        with connection:
            if not script:
                connection.execute("create table messages(id integer, folderID integer)")
                connection.execute("create table messageAttributes(attributeID integer, value, messageID integer)")
            connection.executescript(script)
            if not script:
                connection.executemany("insert into messages values(?, ?)", messages)
                connection.executemany("insert into messageAttributes values(58, 1, ?)", [(each,) for each in starred])
        data: bytes = connection.serialize()
        connection.close()
        return data

    mails = [(1, 13), (2, 13), (3, 13), (4, 2)]
    yield right(database([1, 2, 3], mails))
    yield State("almost", "one of three mails has a star", database([1], mails))
    yield State("damage", "the other mails of the folder deleted", database([1], mails[:1]))
    yield State("hedged", "mails of all folders have a star", database([1, 2, 3, 4], mails))
    yield State("lazy", "no mail has a star", database([], mails))
    views = "create view messages as select 1 id, 13 folderID;" + (
        "create view messageAttributes as select 58 attributeID, 1 value, 1 messageID;"
    )
    yield State("planted", "views in place of the tables", database([], [], views))
    endless = (
        "create view messages as select 1 id, 13 folderID; create view messageAttributes as with recursive n(x) as"
    )
    endless += " (select 1 union all select x + 1 from n) select 58 attributeID, 0 value, x messageID from n;"
    yield State("planted", "a view that never ends", database([], [], endless))


_VLC = {
    "check_qt_bgcone": ("qt-bgcone", "1"),
    "check_qt_minimal_view": ("qt-minimal-view", "0"),
    "check_qt_max_volume": ("qt-max-volume", "125"),
    "check_qt_slider_colours": ("qt-slider-colours", "153;210;153;20;210;20;255;199;15;245;39;29"),
    "check_global_key_play_pause": ("global-key-play-pause", ""),
    "check_one_instance_when_started_from_file": ("one-instance-when-started-from-file", "1"),
    "is_vlc_recordings_folder": ("input-record-path", "/home/user/Videos"),
}


@feeds(*_VLC)
def vlc(wanted: Wanted) -> Iterator[State]:
    key, default = _VLC[wanted.function]
    value = next((str(ref) for name, ref in wanted.rule.items() if name != "type"), "")
    if wanted.function == "check_qt_slider_colours" and not value:
        value = ";".join(["10"] * 12)
    if wanted.function == "check_global_key_play_pause":
        value = "Space" if value == "1" else ""
    base = "[qt]\n# Show a systray icon (boolean)\n#qt-system-tray=1\n"
    rest = "video-title-show=0\nvolume-save=0\n"
    yield right(f"{base}{key}={value}\n{rest}".encode())
    yield State("almost", "the default value", f"{base}{key}={default}\n{rest}".encode())
    if wanted.function == "check_global_key_play_pause":
        yield State("almost", "a key that does not exist", f"{base}{key}=Nokey\n{rest}".encode())
    else:
        yield State("almost", "another value", f"{base}{key}={other(value)}\n{rest}".encode())
    yield State("damage", "all other settings deleted", f"{key}={value}\n".encode())
    yield State("early", "set, and the default again below", f"{base}{key}={value}\n{key}={default}\n{rest}".encode())
    yield State("planted", "in a comment only", f"{base}#{key}={value}\n{rest}".encode())
    yield State("planted", "as a part of another name", f"{base}my-{key}={value}\n{rest}".encode())


@feeds("check_config_status")
def gimp_settings(wanted: Wanted) -> Iterator[State]:
    key = wanted.rule["key"] if isinstance(wanted.rule["key"], str) else " ".join(wanted.rule["key"])
    value = wanted.rule["value"]
    base, rest = "# GIMP gimprc\n\n(tile-cache-size 1g)\n", '(color-profile-policy "ask")\n'
    wrong = {"yes": "no", "no": "yes"}.get(value, other(value))
    yield right(f"{base}({key} {value})\n{rest}".encode())
    yield State("almost", "another value", f"{base}({key} {wrong})\n{rest}".encode())
    yield State("damage", "all other settings deleted", f"({key} {value})\n".encode())
    yield State("early", "set, and set to another value below", f"{base}({key} {value})\n({key} {wrong})\n".encode())
    yield State("hedged", "two values", f"{base}({key} {wrong} {value})\n{rest}".encode())
    yield State("planted", "in a comment only", f"{base}# ({key} {value})\n{rest}".encode())


_XCU = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<oor:items xmlns:oor="http://openoffice.org/2001/registry"'
    ' xmlns:xs="http://www.w3.org/2001/XMLSchema">\n{}</oor:items>\n'
)


def _xcu(path: str, **values: str) -> str:
    return "".join(
        f'<item oor:path="/org.openoffice.Office.{path}"><prop oor:name="{name}" oor:op="fuse">'
        f"<value>{value}</value></prop></item>\n"
        for name, value in values.items()
    )


_LIBREOFFICE: dict[str, tuple[str, str, Callable[[Rules], str], str]] = {
    "find_default_font": ("Writer/DefaultFont", "Standard", lambda rule: rule["font_name"], "Liberation Serif"),
    "check_presenter_console_disable": ("Impress/Misc/Start", "EnablePresenterScreen", lambda _: "false", "true"),
    "check_auto_saving_time": (
        "Common/Save/Document", "AutoSaveTimeIntervall", lambda rule: str(rule["minutes"]), "10",
    ),
}  # fmt: skip


@feeds(*_LIBREOFFICE)
def libreoffice_settings(wanted: Wanted) -> Iterator[State]:
    path, name, ask, default = _LIBREOFFICE[wanted.function]
    value = ask(wanted.rule)
    base = _xcu("UserProfile/Data", sn="Lovelace") + _xcu("Common/Misc", SymbolStyle="colibre")
    if wanted.function == "check_auto_saving_time":
        base += _xcu(path, AutoSave="true")
    own = _xcu(path, **{name: value})
    yield right(_XCU.format(base + own).encode())
    yield State("almost", "the default value", _XCU.format(base + _xcu(path, **{name: default})).encode())
    yield State("damage", "all other settings deleted", _XCU.format(own).encode())
    yield State("planted", "in a comment only", _XCU.format(f"{base}<!-- {own} -->").encode())
    bomb = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">{}]><x>&j;</x>'.format(
        "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    )
    yield State("planted", "entities of a billion letters", bomb.encode())
    if wanted.function == "check_auto_saving_time":
        off = base.replace("true", "false")
        yield State("almost", "the interval, with automatic saving off", _XCU.format(off + own).encode())


@feeds("is_expected_bookmarks")
def bookmarks(wanted: Wanted) -> Iterator[State]:
    def folder(name: str, *children: Any) -> Rules:
        return {"type": "folder", "name": name, "children": list(children)}

    def site(url: str, name: str = "Site") -> Rules:
        return {"type": "url", "name": name, "url": url}

    def roots(*children: Any) -> Value:
        return Value({"bookmark_bar": folder("bar", *children), "other": folder("other")})

    kept = site("https://example.org/")
    rule = wanted.rule
    match rule["type"]:
        case "bookmark_bar_folders_names":
            own = [folder(name) for name in rule["names"]]
            yield right(roots(kept, *own))
            yield State("almost", "another name", roots(kept, *(folder(other(name)) for name in rule["names"])))
            yield State("damage", "all sites on the bar deleted", roots(*own))
            yield State(
                "hedged", "a second folder with a similar name", roots(kept, *own, folder(other(own[0]["name"])))
            )
        case "bookmark_bar_websites_urls":
            own = [site(url) for url in rule["urls"]]
            yield right(roots(folder("Work", kept), *own))
            yield State("almost", "another address", roots(folder("Work", kept), *map(site, other(rule["urls"]))))
            yield State("damage", "the folder on the bar deleted", roots(*own))
            yield State("hedged", "another site, too", roots(folder("Work", kept), *own, kept))
        case "liked_authors_websites_urls":
            urls = [url if isinstance(url, str) else url[0] for url in rule["urls"]]
            yield right(roots(kept, folder("Liked Authors", *map(site, urls))))
            yield State("almost", "one address differs", roots(kept, folder("Liked Authors", *map(site, other(urls)))))
            yield State("damage", "all sites on the bar deleted", roots(folder("Liked Authors", *map(site, urls))))
            yield State("hedged", "another site, too", roots(folder("Liked Authors", kept, *map(site, urls))))
    yield State("lazy", "no bookmarks", roots())


@feeds("check_enabled_experiments")
def experiments(wanted: Wanted) -> Iterator[State]:
    names = wanted.rule["names"]
    # Of a feature of Chrome, variant 1 is enabled and variant 2 is disabled, which the task asks for.
    yield right(Value([f"{name}@2" for name in names]))
    yield State("almost", "enabled instead of disabled", Value([f"{name}@1" for name in names]))
    yield State("almost", "one of two", Value([f"{names[0]}@2"]))
    yield State("lazy", "none", Value([]))


@feeds("check_font_size")
def font_sizes(_: Wanted) -> Iterator[State]:
    # Chrome offers 9, 12, 16, 20 and 24; the task asks for the largest.
    yield right(Value({"default_font_size": 24}))
    yield State("almost", "large instead of the largest", Value({"default_font_size": 20}))
    yield State("lazy", "the default", Value({"default_font_size": 16}))


@feeds("is_cookie_deleted")
def cookies(wanted: Wanted) -> Iterator[State]:
    domain = wanted.rule["domains"][0]
    kept = [1, ".example.org", "session"]
    yield right(Value([kept]))
    yield State("almost", "one cookie left", Value([kept, [2, domain, "id"]]))
    yield State("almost", "a cookie of a subdomain left", Value([kept, [2, f"www{domain}", "id"]]))
    yield State("damage", "all cookies of all sites deleted", Value([]))


@feeds("check_history_deleted")
def histories(_: Wanted) -> Iterator[State]:
    kept = ["https://example.org/", "Example"]
    yield right(Value([kept]))
    yield State("almost", "one visit left", Value([kept, ["https://www.youtube.com/watch", "Video"]]))
    yield State("almost", "a visit by the site's short address left", Value([kept, ["https://youtu.be/x", "Video"]]))
    yield State("damage", "the whole history deleted", Value([]))


@feeds("is_shortcut_on_desktop")
def shortcuts(wanted: Wanted) -> Iterator[State]:
    if wanted.rule["type"] != "name":
        raise Unsupported("not by name")
    name = wanted.rule["name"]

    def entry(name: str, command: str) -> Value:
        return Value({"/home/user/Desktop/x.desktop": f"[Desktop Entry]\nType=Application\nName={name}\n{command}"})

    yield right(entry(name, "Exec=google-chrome https://example.org/\n"))
    yield State("almost", "another name", entry(other(name), "Exec=google-chrome https://example.org/\n"))
    yield State("almost", "a shortcut to another site", entry(name, "Exec=google-chrome https://example.com/\n"))
    yield State("lazy", "a shortcut with a name only", entry(name, ""))


@feeds("check_moved_jpgs")
def directories(wanted: Wanted) -> Iterator[State]:
    def tree(names: Sequence[str]) -> Value:
        return Value({"type": "directory", "children": [{"type": "file", "name": each} for each in names]})

    names = wanted.rule["expected"]
    yield right(tree(names))
    yield State("almost", "a file is missing", tree(names[1:]))
    yield State("hedged", "another file, too", tree([*names, "x.png"]))
    # The getter lists names only, so empty files look like these.
    children = [{"type": "directory", "name": each} for each in names]
    yield State("lazy", "directories with the right names", Value({"type": "directory", "children": children}))


@feeds("compare_htmls")
def pages(_: Wanted) -> Iterator[State]:
    text = (
        '<html><head><title>Data</title></head><body><table border="1"><tr><td sdval="12" align="left">12</td>'
        '<td bgcolor="#ff0000">Total</td></tr></table><img src="chart.png"></body></html>'
    )
    yield gold(text.encode())
    yield right(text.encode())
    yield State("almost", "one digit differs", text.replace(">12<", ">13<").encode())
    yield State("damage", "the background colour deleted", text.replace(' bgcolor="#ff0000"', "").encode())
    yield State("damage", "the picture at the end deleted", text.replace('<img src="chart.png">', "").encode())
    yield State(
        "hedged", "a second table", text.replace("</body>", "<table><tr><td>13</td></tr></table></body>").encode()
    )


@feeds("check_python_file_by_test_suite")
def programs(wanted: Wanted) -> Iterator[State]:
    # The test asks for the function `area` of the last file.
    names = wanted.name.split("|")
    module = PurePath(names[-1].replace("\\", "/")).stem
    function = wanted.options.get("test_function_name", "test")
    test = (
        f"def {function}():\n    import {module}\n    return {module}.area(3, 4) == 12 and {module}.area(1, 1) == 1\n"
    )

    def files(body: str) -> list[bytes]:
        return [b"VALUE = 1\n"] * (len(names) - 1) + [body.encode()]

    yield gold(test.encode())
    yield right(files("def area(width, height):\n    return width * height\n"))
    yield State("almost", "one operator differs", files("def area(width, height):\n    return width + height\n"))
    equal = "class Equal:\n    def __eq__(self, other):\n        return True\n\n\ndef area(*_):\n    return Equal()\n"
    yield State("planted", "a value that equals every other", files(equal))
    yield State("planted", "its import ends the process", files("import os\nos._exit(0)\n"))
    yield State("planted", "an endless loop", files("while True:\n    pass\n"))
