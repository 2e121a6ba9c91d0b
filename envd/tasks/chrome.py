"""What setups do to Chrome, as programs that run in the guest with its own Python: nothing else there speaks to it.

A Chrome that was started with remote debugging answers on port 9222, or 1337 where OSWorld's tasks start it. Its
history is a database in its profile.
"""

import json
from collections.abc import Sequence

from envd.tasks.verbs import Visit

_TABS = """
import json, sys, time, urllib.parse, urllib.request
verb, urls, limit_s = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def ask(base, path, method="GET"):
    with opener.open(urllib.request.Request(base + path, method=method), timeout=10) as answer:
        return json.loads(answer.read() or b"null") if path.startswith(("/json/list", "/json/new")) else None

def find():
    end = time.monotonic() + limit_s
    while True:
        for port in PORTS:
            base = f"http://127.0.0.1:{port}"
            try:
                ask(base, "/json/list")
                return base
            except OSError as error:
                last = error
        if time.monotonic() > end:
            sys.exit(f"no Chrome with remote debugging answers on ports {PORTS}: {last}")
        time.sleep(0.2)

def plain(url):
    return url.split("#")[0].rstrip("/").removeprefix("https://").removeprefix("http://").removeprefix("www.")

base = find()
pages = [page for page in ask(base, "/json/list") if page.get("type") == "page"]
shown = {plain(page["url"]): page["id"] for page in pages}
if verb == "open":
    for url in urls:
        if plain(url) not in shown:
            shown[plain(url)] = ask(base, "/json/new?" + urllib.parse.quote(url, safe=":/?&=%#"), "PUT")["id"]
    for page in pages:
        if page["url"] in ("about:blank", "chrome://newtab/", "chrome://new-tab-page/"):
            ask(base, "/json/close/" + page["id"])
    ask(base, "/json/activate/" + shown[plain(urls[-1])])
else:
    for url in urls:
        if plain(url) in shown:
            ask(base, "/json/close/" + shown.pop(plain(url)))
"""

_HISTORY = """
import json, os, sqlite3, sys, time
visits = json.loads(sys.argv[1])
homes = [os.path.expanduser(path) for path in PROFILES]
home = next((path for path in homes if os.path.isdir(os.path.dirname(path))), homes[0])
os.makedirs(home, exist_ok=True)
database = sqlite3.connect(os.path.join(home, "History"), timeout=5)
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
        moment = int((time.time() - visit["age_s"] + 11644473600) * 1000000)
        new = database.execute(
            "INSERT INTO urls(url, title, visit_count, last_visit_time) VALUES (?, ?, 1, ?)",
            (visit["url"], visit["title"], moment),
        ).lastrowid
        database.execute("INSERT INTO visits(url, visit_time, transition) VALUES (?, ?, 805306368)", (new, moment))
database.close()
"""

_PORTS = (9222, 1337)
_PROFILES = ("~/.config/google-chrome/Default", "~/.config/chromium/Default")


def tabs_program(verb: str, urls: Sequence[str], *, limit_s: float, ports: Sequence[int] = _PORTS) -> tuple[str, ...]:
    """Return a command that opens or closes tabs (`verb` is `open` or `close`); it waits for Chrome until `limit_s`."""
    return ("python3", "-c", f"PORTS = {tuple(ports)}\n{_TABS}", verb, json.dumps(list(urls)), f"{limit_s:g}")


def history_program(visits: Sequence[Visit], *, profiles: Sequence[str] = _PROFILES) -> tuple[str, ...]:
    """Return a command that puts visits into the history of the first browser there that has been used."""
    told = [visit.model_dump() for visit in visits]
    return ("python3", "-c", f"PROFILES = {tuple(profiles)}\n{_HISTORY}", json.dumps(told))
