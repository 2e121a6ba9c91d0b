"""OSWorld's three Chrome setup verbs for Linux guests, as Python programs that run inside the guest.

OSWorld's own connect to Chrome's debugging port and download an empty history database. A sandbox can do neither: only
the guest's service is forwarded. Inside the guest, Chrome answers on port 9222, or on 1337 if OSWorld's tasks start it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TABS = """
import json, sys, time, urllib.parse, urllib.request
verb, urls, limit_s, ports = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def send(base, path, method="GET"):
    with opener.open(urllib.request.Request(base + path, method=method), timeout=10) as response:
        return json.loads(response.read() or b"null") if path.startswith(("/json/list", "/json/new")) else None

def find():
    end = time.monotonic() + limit_s
    while True:
        for port in ports:
            base = f"http://127.0.0.1:{port}"
            try:
                send(base, "/json/list")
                return base
            except OSError as error:
                last = error
        if time.monotonic() > end:
            sys.exit(f"no Chrome with remote debugging on ports {ports}: {last}")
        time.sleep(0.2)

def plain(url):
    return url.split("#")[0].rstrip("/").removeprefix("https://").removeprefix("http://").removeprefix("www.")

base = find()
pages = [page for page in send(base, "/json/list") if page.get("type") == "page"]
shown = {plain(page["url"]): page["id"] for page in pages}
if verb == "open":
    for url in urls:
        if plain(url) not in shown:
            shown[plain(url)] = send(base, "/json/new?" + urllib.parse.quote(url, safe=":/?&=%#"), "PUT")["id"]
    for page in pages:
        if page["url"] in ("about:blank", "chrome://newtab/", "chrome://new-tab-page/"):
            send(base, "/json/close/" + page["id"])
    if urls:
        send(base, "/json/activate/" + shown[plain(urls[-1])])
else:
    for url in urls:
        if plain(url) in shown:
            send(base, "/json/close/" + shown.pop(plain(url)))
"""

_HISTORY = """
import json, os, sqlite3, sys, time
visits = json.loads(sys.argv[1])
profiles = [os.path.expanduser(path) for path in json.loads(sys.argv[2])]
profile = next((path for path in profiles if os.path.isdir(os.path.dirname(path))), profiles[0])
os.makedirs(profile, exist_ok=True)
database = sqlite3.connect(os.path.join(profile, "History"), timeout=5)
with database:
    database.execute(
        "CREATE TABLE IF NOT EXISTS urls(id INTEGER PRIMARY KEY AUTOINCREMENT, url LONGVARCHAR, title LONGVARCHAR,"
        " visit_count INTEGER DEFAULT 0 NOT NULL, typed_count INTEGER DEFAULT 0 NOT NULL,"
        " last_visit_time INTEGER NOT NULL, hidden INTEGER DEFAULT 0 NOT NULL)"
    )
    database.execute(
        "CREATE TABLE IF NOT EXISTS visits(id INTEGER PRIMARY KEY AUTOINCREMENT, url INTEGER NOT NULL,"
        " visit_time INTEGER NOT NULL, from_visit INTEGER, transition INTEGER DEFAULT 0 NOT NULL,"
        " visit_duration INTEGER DEFAULT 0 NOT NULL)"
    )
    for visit in visits:
        for (old,) in database.execute("SELECT id FROM urls WHERE url = ?", (visit["url"],)).fetchall():
            database.execute("DELETE FROM visits WHERE url = ?", (old,))
            database.execute("DELETE FROM urls WHERE id = ?", (old,))
        # Chrome counts microseconds since 1601.
        moment = int((time.time() - visit.get("visit_time_from_now_in_seconds", 0) + 11644473600) * 1000000)
        new = database.execute(
            "INSERT INTO urls(url, title, visit_count, last_visit_time) VALUES (?, ?, 1, ?)",
            (visit["url"], visit.get("title", ""), moment),
        ).lastrowid
        database.execute("INSERT INTO visits(url, visit_time, transition) VALUES (?, ?, 805306368)", (new, moment))
database.close()
"""

#: Below the 120 s that the guest's service allows a command.
_LIMIT_S = 100.0
_PORTS = (9222, 1337)
_PROFILES = ("~/.config/google-chrome/Default", "~/.config/chromium/Default")


def chrome_command(verb: str, parameters: Mapping[str, Any]) -> list[str] | None:
    """Return the command that performs a Chrome verb in the guest; None for other verbs.

    Raises:
        KeyError: A parameter is missing.
    """
    match verb:
        case "chrome_open_tabs":
            return tabs_command("open", parameters["urls_to_open"])
        case "chrome_close_tabs":
            return tabs_command("close", parameters["urls_to_close"])
        case "update_browse_history":
            return history_command(parameters["history"])
    return None


def tabs_command(
    verb: str, urls: Sequence[str], *, limit_s: float = _LIMIT_S, ports: Sequence[int] = _PORTS
) -> list[str]:
    """Return a command that opens or closes tabs (`verb` is `open` or `close`); it waits for Chrome until `limit_s`."""
    return ["python3", "-I", "-c", _TABS, verb, json.dumps(list(urls)), f"{limit_s:g}", json.dumps(list(ports))]


def history_command(visits: Sequence[Mapping[str, Any]], *, profiles: Sequence[str] = _PROFILES) -> list[str]:
    """Return a command that writes visits into the history of the first browser that has been used."""
    return ["python3", "-I", "-c", _HISTORY, json.dumps(list(visits)), json.dumps(list(profiles))]
