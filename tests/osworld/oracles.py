"""Scripts for OSWorld's tasks that run offline: `python -m tests.osworld.oracles DIR` writes them as trajectories.

For `envd tasks parity --trajectories DIR`. Each task gets `oracle`, which solves it as far as it can be solved on our
image, and `almost`, which breaks one thing; feasible tasks also `give-up`. All are pyautogui calls, which OSWorld's own
`DesktopEnv` performs too: mostly a line for the guest's terminal.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from envd.bench.episodes import pyautogui_calls

_PROFILE = "~/.config/google-chrome/Default"
_LIBREOFFICE = "~/.config/libreoffice/4/user/registrymodifications.xcu"
#: Programs of a task's setup must have their windows before keys are sent. GIMP first makes its list of plug-ins.
_START_WAITS = 8
_GIMP_START_WAITS = 25
#: The line must have ended before the evaluation: closing a program takes seconds.
_END_WAITS = 4


class Lines(NamedTuple):
    """Lines for the guest's terminal."""

    oracle: str
    almost: str


def _gsettings(schema: str, right: str, wrong: str) -> Lines:
    return Lines(f"gsettings set org.gnome.{schema} {right}", f"gsettings set org.gnome.{schema} {wrong}")


def _vlc(right: str, wrong: str) -> Lines:
    return Lines(*(f"echo '{each}' >> ~/.config/vlc/vlcrc" for each in (right, wrong)))


def _gimp(file: str, right: str, wrong: str) -> Lines:
    """GIMP overwrites its settings when it ends."""
    close = "pkill gimp; sleep 2; mkdir -p ~/.config/GIMP/2.10"
    return Lines(*(f"{close}; echo '({each})' >> ~/.config/GIMP/2.10/{file}" for each in (right, wrong)))


def _chrome(right: object, wrong: object, *, file: str = "Preferences") -> Lines:
    """SIGKILL, because Chromium overwrites its settings when it ends."""
    close = f"pkill -9 chrom; mkdir -p {_PROFILE}"
    return Lines(*(f"{close}; echo '{json.dumps(each)}' > {_PROFILE}/{file}" for each in (right, wrong)))


def _search_engine(name: str) -> object:
    url = "https://www.bing.com/search?q={searchTerms}"
    return {"default_search_provider_data": {"template_url_data": {"short_name": name, "keyword": "bing", "url": url}}}


def _bookmarks(folder: str) -> object:
    def root(number: int, name: str, *children: object) -> object:
        return {"children": children, "id": str(number), "name": name, "type": "folder"}

    roots = {
        "bookmark_bar": root(1, "Bookmarks bar", root(4, folder)),
        "other": root(2, "Other bookmarks"),
        "synced": root(3, "Mobile bookmarks"),
    }
    return {"checksum": "", "roots": roots, "version": 1}


def _autosave(minutes: int) -> str:
    # `\x3c` is sed's notation of `<`, for which pyautogui types `>`.
    item = r'\x3citem oor:path="/org.openoffice.Office.Common/Save/Document">'
    prop = r'\x3cprop oor:name="AutoSaveTimeIntervall" oor:op="fuse">'
    value = rf"{item}{prop}\x3cvalue>{minutes}\x3c/value>\x3c/prop>\x3c/item>"
    return rf"pkill -9 soffice; sed -i 's#\x3c/oor:items>#{value}\x3c/oor:items>#' {_LIBREOFFICE}"


def _video_player(name: str) -> str:
    # The image has no `vlc.desktop`, without which `xdg-mime` reports no program.
    entry = rf"[Desktop Entry]\nType=Application\nName=Player\nExec={name} %%f\n"
    kinds = "3gpp avi flv mp2t mp4 mpeg ogg quicktime webm x-flv x-m4v x-matroska x-ms-wmv x-msvideo"
    return (
        f"d=~/.local/share/applications; mkdir -p $d; printf '{entry}' > $d/{name}.desktop;"
        f" for t in {kinds}; do xdg-mime default {name}.desktop video/$t; done"
    )


#: Tasks that a line solves.
LINES: Mapping[str, Lines] = {
    "030eeff7-b492-4218-b312-701ec99ee0cc": _chrome({"enable_do_not_track": True}, {"enable_do_not_track": False}),
    "2ad9387a-65d8-4e33-ad5b-7580065a27ca": _chrome(
        _bookmarks("Favorites"), _bookmarks("Favourites"), file="Bookmarks"
    ),
    "2ae9ba84-3a0d-4d4c-8338-3a1478dc5fe3": _chrome({"profile": {"name": "Thomas"}}, {"profile": {"name": "Tomas"}}),
    "99146c54-4f37-4ab8-9327-5f3291665e1e": _chrome(
        {"profile": {"default_content_setting_values": {"cookies": 4}}}, {"profile": {"exit_type": "Normal"}}
    ),
    "af630914-714e-4a24-a7bb-f9af687d3b91": _chrome(
        {"webkit": {"webprefs": {"default_font_size": 24}}}, {"webkit": {"webprefs": {"default_font_size": 16}}}
    ),
    "bb5e4c0d-f964-439c-97b6-bdb9747de3f4": _chrome(_search_engine("Bing"), _search_engine("Bling")),
    "7767eef2-56a3-4cea-8c9f-48c070c7d65b": _gimp("gimprc", 'theme "Light"', 'theme "Dark"'),
    "7b7617bd-57cc-468e-9c91-40c4ec2bcb3d": _gimp("gimprc", "undo-levels 100", "undo-levels 1000"),
    "d52d6308-ec58-42b7-a2c9-de80e4837b2b": _gimp("sessionrc", "hide-docks yes", "hide-docks no"),
    "2cd43775-7085-45d8-89fa-9e35c0a915cf": Lines(_autosave(3), _autosave(30)),
    "937087b6-f668-4ba6-9110-60682ee33441": Lines(_video_player("vlc"), _video_player("gimp")),
    # The evaluation opens no terminal here, as Openbox has another shortcut for it, and reads the one that is open.
    "13584542-872b-42d8-b299-866967b5c3ef": Lines("stty cols 132 rows 43", "stty cols 132 rows 34"),
    "3ce045a0-877b-42aa-8d2c-b4a863336ab8": _gsettings("desktop.interface text-scaling-factor", "1.5", "1.1"),
    "a4d98375-215b-4a4d-aee9-3d4370fccc41": Lines(
        "gsettings set org.gnome.desktop.screensaver lock-enabled true",
        "gsettings set org.gnome.desktop.screensaver lock-delay 0",
    ),
    # Solved from the start: the image has UTC.
    "b6781586-6346-41cd-935a-a6b1487918fc": Lines(
        "timedatectl status", "echo password | sudo -S ln -sf /usr/share/zoneinfo/Asia/Tokyo /etc/localtime"
    ),
    "bedcedc4-4d72-425e-ad62-21960b11fe0d": _gsettings("settings-daemon.plugins.power idle-dim", "false", "true"),
    "e0df059f-28a6-4169-924f-b9623e7184cc": Lines(
        "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2",
        "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan2",
    ),
    "ec4e3f68-9ea4-4c18-a5c9-69f89d1178b3": _gsettings(
        "shell favorite-apps",
        "\"['thunderbird.desktop', 'google-chrome.desktop']\"",
        "\"['vim.desktop', 'google-chrome.desktop']\"",
    ),
    "f9be0997-4b7c-45c5-b05c-4612b44a6118": Lines(
        "gsettings set org.gnome.desktop.notifications show-banners false",
        "gsettings set org.gnome.desktop.notifications show-in-lock-screen false",
    ),
    "215dfd39-f493-4bc3-a027-8a97d72c61bf": _vlc("qt-bgcone=0", "qt-bgcone=1"),
    "8ba5ae7a-5ae5-4eab-9fcc-5dd4fe3abf89": _vlc(
        "input-record-path=/home/user/Desktop", "input-record-path=/home/user/desktop"
    ),
    "9195653c-f4aa-453d-aa95-787f6ccfaae9": _vlc("qt-max-volume=200", "qt-max-volume=20"),
    "a5bbbcd5-b398-4c91-83d4-55e1e31bbb81": _vlc("qt-minimal-view=1", "qt-minimal-view=0"),
    "d06f0d4d-2cd5-4ede-8de9-598629438c6e": _vlc(
        "qt-slider-colours=9;9;9;9;9;9;9;9;9;9;9;9", "qt-slider-colours=9;9;9;9;9;9;9;9;9;200;200;200"
    ),
    "f3977615-2b45-4ac5-8bba-80c17dbe2a37": _vlc(
        "one-instance-when-started-from-file=0", "one-instance-when-started-from-file=1"
    ),
}


def _address(url: str) -> Sequence[str]:
    return ("pyautogui.hotkey('ctrl', 'l')", f"pyautogui.typewrite({url!r}, interval=0.02)", "pyautogui.press('enter')")


def _view_menu(down_count: int) -> Sequence[str]:
    """The keys by which the task's setup hides the panel."""
    return (
        "pyautogui.press('esc')",
        "pyautogui.press('f10')",
        "pyautogui.press('right', presses=2)",
        f"pyautogui.press('down', presses={down_count})",
        "pyautogui.press('enter')",
    )


#: Tasks that are solved in their program's window: the calls of the oracle, and of a mutant.
WINDOWS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "12086550-11c0-466b-b367-1d9e75b3910e": (
        _address("chrome://password-manager/passwords"),
        _address("chrome://password-manager/settings"),
    ),
    "ef9d12bd-bcee-4ba0-a40e-918400f43ddf": (_view_menu(11), _view_menu(10)),
}
#: Infeasible tasks: only giving up scores 1, and work does not.
INFEASIBLE: Sequence[str] = (
    "3720f614-37fd-4d04-8a6b-76f54f8c222d",
    "480bcfea-d68f-4aaa-a0a9-2589ef319381",
    "ae78f875-5b98-4907-bbb5-9c737fc68c03",
    "5ca86c6f-f317-49d8-b6a7-b527541caae8",
    "e19bd559-633b-4b02-940f-d946248f088e",
    "fbb548ca-c2a6-4601-9204-e39a2efc507b",
    "6d72aad6-187a-4392-a4c4-ed87269c51cf",
    "4783cc41-c03c-4e1b-89b4-50658f642bd5",
    "a462a795-fdc7-4b23-b689-e8b6df786b78",
    "b3d4a89c-53f2-4d6b-8b6a-541fb5d205fa",
    "c288e301-e626-4b98-a1ab-159dcb162af5",
    "fe41f596-a71b-4c2f-9b2f-9dcd40b568c3",
    "7882ed6e-bece-4bf0-bada-c32dc1ddae72",
    "cb130f0d-d36f-4302-9838-b3baf46139b6",
)


def _typed(line: str) -> list[str]:
    """Type a line into a terminal, once the programs of the task's setup have their windows."""
    shortcut, *typing, done = pyautogui_calls(line)
    waits = _GIMP_START_WAITS if "gimp;" in line else _START_WAITS
    return [*["WAIT"] * waits, shortcut, "WAIT", "WAIT", *typing, *["WAIT"] * _END_WAITS, done]


def trajectories() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name of a script, of its task, and its calls."""
    for task, lines in LINES.items():
        for name, line in lines._asdict().items():
            yield name, task, _typed(line)
    for task, (right, wrong) in WINDOWS.items():
        for name, calls in (("oracle", right), ("almost", wrong)):
            yield name, task, [*["WAIT"] * _START_WAITS, *calls, *["WAIT"] * _END_WAITS, "DONE"]
    for task in (*LINES, *WINDOWS):
        yield "give-up", task, ["FAIL"]
    for task in INFEASIBLE:
        yield "oracle", task, ["FAIL"]
        yield "almost", task, _typed("echo this cannot be done")


def write(directory: Path) -> None:
    """Write the scripts as OSWorld's runner writes recorded actions."""
    for name, task, calls in trajectories():
        path = directory / name / task / "traj.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"action": call}) + "\n" for call in calls), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write trajectories for OSWorld's tasks that run offline.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="Gets SCRIPT/TASK/traj.jsonl.")
    write(parser.parse_args().directory)


if __name__ == "__main__":
    main()
