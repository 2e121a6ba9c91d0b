"""Solutions of tasks of OpenComputer, by the names that it gives its tasks: the actions of each step.

They use what an agent has: keys, and commands of the user's shell. Where a program can be driven from outside (UNO,
Script-Fu, DevTools, Marionette, VLC's HTTP interface), the running program makes and saves the change. Otherwise it is
closed first, because it would overwrite its settings when it ends.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from cuaenv.actions import Action, PressKeys, RunShell, TypeText
from envd.tasks.oracle import WaitFor

Steps = Sequence[tuple[Action | WaitFor, ...]]

#: An emulated guest is slow.
_TIMEOUT = timedelta(minutes=2)
_WAITS = 8


def _shell(command: str) -> tuple[Action, ...]:
    return (RunShell(f"set -e; cd ~\n{command}", timeout=_TIMEOUT),)


def _python(code: str) -> tuple[Action, ...]:
    return (RunShell(f"cd ~; python3 - <<'END'\n{code}\nEND", timeout=_TIMEOUT),)


def _slow(command: str) -> Steps:
    """Run a command that may take longer than a step may."""
    begin = RunShell(f"cd ~; rm -f /tmp/code; ( {command}\n echo $? > /tmp/code ) > /tmp/log 2>&1 &")
    wait = RunShell("SECONDS=0; while [ ! -e /tmp/code ] && ((SECONDS < 90)); do sleep 1; done", timeout=_TIMEOUT)
    end = RunShell('tail -n 5 /tmp/log; [ "$(cat /tmp/code)" = 0 ]', timeout=_TIMEOUT)
    return ((begin,), *((wait,) for _ in range(_WAITS)), (end,))


def _close(program: str) -> tuple[Action, ...]:
    """End a program and wait for its end."""
    return _shell(
        f"pkill -x {program} || true; SECONDS=0\n"
        f"while pgrep -x {program} > /dev/null && ((SECONDS < 60)); do sleep 1; done\n"
        f"pkill -KILL -x {program} || true; sleep 1"
    )


def _ini(path: str, section: str, **values: str) -> tuple[Action, ...]:
    """Set values of a file in the format of Qt, KDE and wxWidgets."""
    return _python(
        f"""
import os, re
path, section, values = os.path.expanduser({path!r}), {section!r}, {values!r}
os.makedirs(os.path.dirname(path), exist_ok=True)
lines = open(path).read().splitlines() if os.path.exists(path) else []
if f"[{{section}}]" not in lines:
    lines += [f"[{{section}}]"]
at = lines.index(f"[{{section}}]") + 1
end = next((n for n in range(at, len(lines)) if lines[n].startswith("[")), len(lines))
kept = [line for line in lines[at:end] if line.partition("=")[0] not in values]
new = [f"{{name}}={{value}}" for name, value in values.items()]
open(path, "w").write("\\n".join([*lines[:at], *new, *kept, *lines[end:]]) + "\\n")
"""
    )


def _uno(code: str) -> tuple[Action, ...]:
    """Change the document in the running LibreOffice, and save it."""
    return _python(
        f"""
import time, uno
from com.sun.star.awt import Point, Size
from com.sun.star.beans import PropertyValue
local = uno.getComponentContext()
resolver = local.ServiceManager.createInstanceWithContext("com.sun.star.bridge.UnoUrlResolver", local)
context = resolver.resolve("uno:socket,host=localhost,port=2002;urp;StarOffice.ComponentContext")
desktop = context.ServiceManager.createInstanceWithContext("com.sun.star.frame.Desktop", context)
for _ in range(60):
    doc = desktop.getCurrentComponent()
    if doc is not None and hasattr(doc, "getURL"):
        break
    time.sleep(1)
def value(name, content):
    result = PropertyValue()
    result.Name, result.Value = name, content
    return result
{code}
doc.store()
"""
    )


def _script_fu(code: str) -> tuple[Action, ...]:
    """Evaluate an expression in the running GIMP."""
    return _python(
        f"""
import socket, struct
code = {code!r}.encode()
with socket.create_connection(("127.0.0.1", 10008)) as gimp:
    gimp.settimeout(110)
    gimp.sendall(b"G" + struct.pack(">H", len(code)) + code)
    head = b""
    while len(head) < 4:
        head += gimp.recv(4 - len(head))
    text = gimp.recv(struct.unpack(">H", head[2:])[0])
assert head[1] == 0, text
"""
    )


def _devtools(code: str) -> Steps:
    """Evaluate JavaScript in Chromium's page."""
    script = f"(() => {{{code}}})()"
    return _slow(
        f"""python3 - <<'END'
import json, time, urllib.request, websocket
pages = json.load(urllib.request.urlopen("http://127.0.0.1:9222/json"))
page = next(each for each in pages if each["type"] == "page" and each["url"].startswith("file:"))
link = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=600)
def evaluate(expression):
    link.send(json.dumps({{"id": 1, "method": "Runtime.evaluate", "params": {{"expression": expression}}}}))
    answer = {{}}
    while answer.get("id") != 1:
        answer = json.loads(link.recv())
    assert "exceptionDetails" not in answer["result"], answer
    return answer["result"]["result"].get("value")
while evaluate("location.protocol + document.readyState") != "file:complete":
    time.sleep(1)
evaluate({script!r})
END"""
    )


def _marionette(code: str) -> Steps:
    """Drive Firefox's page."""
    return _slow(
        f"""python3 - <<'END'
from marionette_driver.marionette import Marionette
client = Marionette(host="127.0.0.1", port=2828)
client.start_session()
{code}
client.delete_session()
END"""
    )


def _rewrite_zip(path: str, member: str, code: str) -> tuple[Action, ...]:
    """Change the text of the member of a ZIP file whose name ends so."""
    return _python(
        f"""
import os, re, zipfile
path = os.path.expanduser({path!r})
with zipfile.ZipFile(path) as source:
    parts = [(each, source.read(each)) for each in source.infolist()]
with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
    for info, data in parts:
        if info.filename.endswith({member!r}):
            text = data.decode()
            {code}
            assert changed != text
            data = changed.encode()
        target.writestr(info.filename, data)
"""
    )


def _thunderbird(*lines: str) -> tuple[Action, ...]:
    """Add preferences to the profile of the task."""
    text = "\n".join(lines)
    return _shell(f"for file in .thunderbird/*/prefs.js; do cat >> $file <<'END'\n{text}\nEND\ndone")


def _vlc(request: str) -> tuple[Action, ...]:
    return _shell(f"curl -sf -u :secret 'http://127.0.0.1:8080/requests/status.xml?{request}' > /dev/null")


def _gimp(image: str, change: str, target: str) -> tuple[Action, ...]:
    return _script_fu(
        f"""(let* ((image (car (gimp-file-load RUN-NONINTERACTIVE "/home/user/Documents/{image}" "{image}")))
        (layer (car (gimp-image-get-active-drawable image)))) {change}
        (gimp-file-save RUN-NONINTERACTIVE image layer "/home/user/Documents/{target}" "{target}"))"""
    )


_DRAW = """
page = doc.getDrawPages().getByIndex(0)
def box(text, x, y):
    shape = doc.createInstance("com.sun.star.drawing.RectangleShape")
    shape.setPosition(Point(x, y))
    shape.setSize(Size(5000, 1800))
    page.add(shape)
    shape.setString(text)
    return shape
def connect(first, second):
    line = doc.createInstance("com.sun.star.drawing.ConnectorShape")
    page.add(line)
    line.StartShape, line.EndShape = first, second
"""

_REPLACE = """
def replace(old, new):
    search = doc.createReplaceDescriptor()
    search.setSearchString(old)
    search.setReplaceString(new)
    assert doc.replaceAll(search)
"""

_PAGE = """
style = doc.StyleFamilies.getByName("PageStyles").getByName(doc.CurrentController.ViewCursor.PageStyleName)
style.HeaderIsOn, style.FooterIsOn = True, True
style.HeaderText.setString("Quarterly Report Q1 2026")
style.FooterText.setString("Confidential")
width, height = style.Width, style.Height
style.IsLandscape, style.Width, style.Height = True, max(width, height), min(width, height)
"""

_PICTURES = """
from com.sun.star.text.ControlCharacter import PARAGRAPH_BREAK
from com.sun.star.text.TextContentAnchorType import AS_CHARACTER
provider = context.ServiceManager.createInstanceWithContext("com.sun.star.graphic.GraphicProvider", context)
for name in ("photo1", "photo2"):
    file = value("URL", f"file:///home/user/Pictures/{name}.png")
    picture = doc.createInstance("com.sun.star.text.TextGraphicObject")
    picture.AnchorType, picture.Graphic = AS_CHARACTER, provider.queryGraphic((file,))
    end = doc.Text.createTextCursor()
    end.gotoEnd(False)
    doc.Text.insertControlCharacter(end, PARAGRAPH_BREAK, False)
    doc.Text.insertTextContent(end, picture, False)
"""

_SORT = """
sheet = doc.Sheets.getByName("Inventory")
head = sheet.getCellRangeByName("E1")
head.String, head.CharWeight = "Total Value", 150.0
for row in range(2, 22):
    sheet.getCellRangeByName(f"E{row}").Formula = f"=C{row}*D{row}"
field = uno.createUnoStruct("com.sun.star.table.TableSortField")
field.Field, field.IsAscending = 4, False
fields = uno.Any("[]com.sun.star.table.TableSortField", (field,))
sheet.getCellRangeByName("A1:E21").sort((value("SortFields", fields), value("ContainsHeader", True)))
"""

_COLOURS = """
sheet = doc.Sheets.getByName("Sales")
style = doc.createInstance("com.sun.star.style.CellStyle")
doc.StyleFamilies.getByName("CellStyles").insertByName("HighTotal", style)
style.CharColor, style.CharWeight = 0xFF0000, 150.0
def area(name):
    ranges = doc.createInstance("com.sun.star.sheet.SheetCellRanges")
    ranges.addRangeAddress(sheet.getCellRangeByName(name).RangeAddress, False)
    return ranges
formats = sheet.ConditionalFormats
formats.createByRange(area("B2:E13"))
formats.createByRange(area("F2:F13"))
scale, high = formats.getConditionalFormats()[-2:]
scale.createEntry(1, 0)
high.createEntry(0, 0)
entry = high.getByIndex(0)
entry.StyleName, entry.Formula1, entry.Operator = "HighTotal", "100000", 1
"""

_TRANSITIONS = """
from com.sun.star.presentation.FadeEffect import FADE_FROM_LEFT
pages = doc.getDrawPages()
for index in range(pages.getCount()):
    pages.getByIndex(index).Effect = FADE_FROM_LEFT
notes = pages.getByIndex(3).getNotesPage()
for index in range(notes.getCount()):
    shape = notes.getByIndex(index)
    if shape.supportsService("com.sun.star.presentation.NotesShape"):
        break
else:
    shape = doc.createInstance("com.sun.star.presentation.NotesShape")
    notes.add(shape)
shape.setString("Ask for questions and distribute business cards.")
"""

_UNITS = """
import os, xml.etree.ElementTree as ET
path = os.path.expanduser("~/.config/FreeCAD/user.cfg")
os.makedirs(os.path.dirname(path), exist_ok=True)
if not os.path.exists(path):
    open(path, "w").write("<FCParameters><FCParamGroup Name='Root'/></FCParameters>")
tree = ET.parse(path)
group = tree.getroot().find("FCParamGroup")
for name in ("BaseApp", "Preferences", "Units"):
    found = next((each for each in group if each.get("Name") == name), None)
    group = ET.SubElement(group, "FCParamGroup", Name=name) if found is None else found
for each in group.findall("FCInt[@Name='UserSchema']"):
    group.remove(each)
ET.SubElement(group, "FCInt", Name="UserSchema", Value="3")
tree.write(path)
"""

_STYLES = r"""
import re
path = "Documents/drawing.svg"
text = open(path).read()
for name, colour in (("rect1", "#ff0000"), ("circle1", "#0000ff")):
    text, count = re.subn(rf'(id="{name}"[^>]*fill:)#000000', rf"\g<1>{colour}", text)
    assert count == 1
open(path, "w").write(text.replace("</svg>", '<text x="50" y="50" id="text1">Styled Shapes</text></svg>'))
"""

_PATHS = """
path = "Documents/landscape.svg"
text = open(path).read()
for old, new in (('width="640"', 'width="800"'), ('height="480"', 'height="600"')):
    text = text.replace(old, new, 1)
more = '<path id="a" d="M 0,0 L 50,90 90,10 Z"/><path id="b" d="M 100,100 C 120,150 180,90 200,120"/>'
open(path, "w").write(text.replace("</svg>", f'{more}<text id="t" x="9" y="40">Resized Canvas</text></svg>'))
"""

_GLOW = """
path = "Documents/effects_project.kdenlive"
text = open(path).read()
prop = lambda name, value: f'<property name="{name}">{value}</property>'
clip = prop("resource", "/home/user/Videos/sample.mp4") + prop("mlt_service", "avformat")
glow = prop("mlt_service", "frei0r.glow") + prop("kdenlive_id", "frei0r.glow")
at = text.index("<playlist")
more = (
    f'<producer id="clip0" in="0" out="24">{clip}</producer><playlist id="video0">'
    f'<entry producer="clip0" in="0" out="24"><filter id="glow0">{glow}</filter></entry></playlist>'
)
open(path, "w").write(text[:at] + more + text[at:])
"""

_EVENT = """
document.querySelector('td[data-date="15"]').click();
document.getElementById("event-title").value = "Team Review";
document.getElementById("event-time").value = "14:30";
document.getElementById("save-event").click();
"""

_NOTES = """
const notes = [["Grocery List", "Milk, eggs, bread, coffee"],
    ["Sprint Planning", "Review backlog and assign Monday stories"], ["Scratch", "temporary placeholder"]];
for (const [title, body] of notes) {
    document.getElementById("note-title").value = title;
    document.getElementById("note-body").value = body;
    document.getElementById("add-note").click();
}
const left = [...document.querySelectorAll("#notes-list .note")];
left.find(note => note.textContent.includes("Scratch")).querySelector("button").click();
"""

_DASHBOARD = """
for _ in range(7):
    client.find_element("id", "inc").click()
client.find_element("id", "toggle").click()
field = client.find_element("id", "status")
field.clear()
field.send_keys("ready")
"""

_SURVEY = """
texts = {"fullname": "Jordan Miller", "age": "29", "country": "Canada", "comments": "Looks great overall"}
for name, text in texts.items():
    client.find_element("id", name).send_keys(text)
client.find_element("id", "newsletter").click()
client.find_element("css selector", "#survey button, #survey input[type=submit]").click()
"""

_COMMENT = r"""changed = re.sub(r'(name="Comment"[^>]*>\s*<String value=")', r"\1Prototype v1", text)"""
_THREE_FOUR = """changed = text.replace("<sigN>4</sigN>", "<sigN>3</sigN>")"""
_PEDAL = """
            mark = '<Spanner type="Pedal"><Pedal/><next><location><measures>2</measures></location></next></Spanner>'
            changed = text.replace("<Chord>", mark + "<Chord>", 1)"""

_AUDACITY, _SHOTCUT = "~/.audacity-data/audacity.cfg", "~/.config/Meltytech/Shotcut.conf"
_OBS = "~/.config/obs-studio/basic/profiles/Untitled/basic.ini"

ORACLES: Mapping[str, Steps] = {
    "audacity_preference_default_sample_rate": (
        _close("audacity"),
        _ini(_AUDACITY, "Quality", DefaultSampleRate="48000"),
    ),
    "audacity_theme_dark_preference": (_close("audacity"), _ini(_AUDACITY, "Theme", Name="dark")),
    "audacity_export_ogg_vorbis": (_shell("ffmpeg -v error -y -i Music/voice.wav -c:a libvorbis Music/voice.ogg"),),
    "chrome_local_calendar_event": _devtools(_EVENT),
    "chrome_local_notes_crud": _devtools(_NOTES),
    "cloudcompare_ply_to_xyz_ascii": _slow(
        "QT_QPA_PLATFORM=offscreen CloudCompare -SILENT -AUTO_SAVE OFF -O Documents/lidar.ply"
        " -C_EXPORT_FMT ASC -EXT xyz -PREC 6 -SAVE_CLOUDS FILE Documents/lidar.xyz"
    ),
    "cloudcompare_ply_binary_to_ascii": _slow(
        "QT_QPA_PLATFORM=offscreen CloudCompare -SILENT -AUTO_SAVE OFF -O Documents/scan_binary.ply"
        " -C_EXPORT_FMT PLY -PLY_EXPORT_FMT ASCII -SAVE_CLOUDS FILE Documents/scan_ascii.ply"
    ),
    "darktable_import_rate_export_jpeg": (
        _close("darktable"),
        *_slow(
            "mkdir -p Pictures/exports;"
            " sqlite3 ~/.config/darktable/library.db 'update images set flags = (flags & ~7) | 2'"
            " && darktable-cli Pictures/sunset.png Pictures/exports/sunset_out.jpg --core --library :memory:"
        ),
    ),
    "firefox_local_js_stateful_interaction": _marionette(_DASHBOARD),
    "firefox_local_form_submit_dom": _marionette(_SURVEY),
    "freecad_change_unit_schema": (_close("freecad"), _python(_UNITS)),
    "freecad_document_comment_metadata": (
        _close("freecad"),
        _rewrite_zip("~/Documents/metadata.FCStd", "Document.xml", _COMMENT),
    ),
    "galculator_large_multiplication": ((TypeText("9876*5432"), PressKeys("enter")),),
    # GTK ignores a second press of a button within 250 ms: typed at once, the second minus is lost.
    "galculator_negative_result": ((TypeText("37-89+14"),), (TypeText("-62"), PressKeys("enter"))),
    "gedit_create_bash_script": (
        (
            TypeText(
                "#!/bin/bash\nBACKUP_DIR='/home/user/backups'\nSOURCE_DIR='/home/user/Documents'\n\n"
                'mkdir -p $BACKUP_DIR\ncp $SOURCE_DIR/*.txt $BACKUP_DIR/\necho "Backup completed successfully"'
            ),
        ),
        (PressKeys(("ctrl", "s")),),
        (PressKeys(("ctrl", "a")), TypeText("/home/user/Documents/backup.sh")),
        (PressKeys("enter"), WaitFor(file="/home/user/Documents/backup.sh")),
    ),
    "gedit_edit_csv_data": (
        (PressKeys(("ctrl", "a")),),
        (
            TypeText(
                "Name,Age,Salary,Department\nAlice,30,72000,Engineering\nBob,25,58000,Marketing\n"
                "Charlie,35,85000,Engineering\nDavid,28,55000,Sales"
            ),
        ),
        (PressKeys(("ctrl", "s")),),
    ),
    "gimp_resize_export_jpeg": (_gimp("landscape.png", "(gimp-image-scale image 640 480)", "landscape_small.jpg"),),
    "gimp_color_invert_bmp": (_gimp("solid_red.png", "(gimp-drawable-invert layer FALSE)", "inverted.bmp"),),
    "inkscape_edit_svg_styles": (_close("inkscape"), _python(_STYLES)),
    "inkscape_resize_and_add_paths": (_close("inkscape"), _python(_PATHS)),
    "kdenlive_project_with_effects": (_close("kdenlive"), _python(_GLOW)),
    "krita_enable_python_plugin": (
        _close("krita"),
        _ini("~/.config/kritarc", "python", **{"Enable tenbrushes": "true"}),
    ),
    "calc_inventory_sort_filter": (_uno(_SORT),),
    "calc_conditional_formatting_sales_heatmap": (_uno(_COLOURS),),
    "draw_org_chart": (
        _uno(
            f"""{_DRAW}
head = box("CEO - Alice", 8000, 1500)
for text, x in (("CTO - Bob", 1500), ("CFO - Carol", 8000), ("COO - Dave", 14500)):  # codespell:ignore coo
    connect(head, box(text, x, 7000))
"""
        ),
    ),
    "draw_software_flowchart": (
        _uno(
            f"""{_DRAW}
names = ("Start", "Design", "Implement", "Test", "Deploy")
boxes = [box(name, 8000, 1500 + 4000 * index) for index, name in enumerate(names)]
for pair in zip(boxes, boxes[1:]):
    connect(*pair)
doc.storeAsURL("file:///home/user/Documents/flowchart.odg", (value("FilterName", "draw8"),))
"""
        ),
    ),
    "impress_add_transitions_to_slides": (_uno(_TRANSITIONS),),
    "libreoffice_writer_insert_images": (_uno(_PICTURES),),
    "libreoffice_writer_report_with_headers_footers": (_uno(_PAGE),),
    "libreoffice_writer_find_replace": (
        _uno(f'{_REPLACE}\nreplace("ACME Corp", "GlobalTech Industries")\nreplace("2025", "2026")'),
    ),
    "musescore3_change_time_signature": (
        _close("mscore3"),
        _rewrite_zip("~/Documents/waltz_sketch.mscz", ".mscx", _THREE_FOUR),
    ),
    "musescore3_gap_pedal_marks": (_close("mscore3"), _rewrite_zip("~/Documents/pedal_study.mscz", ".mscx", _PEDAL)),
    "obs_gap_recording_output_settings": (
        _close("obs"),
        _shell("mkdir -p Videos/Recordings"),
        _ini(_OBS, "Output", Mode="Simple"),
        _ini(
            _OBS,
            "SimpleOutput",
            RecFormat="mkv",
            RecEncoder="x264",
            FilePath="/home/user/Videos/Recordings",
            VBitrate="8000",
        ),
    ),
    "pcmanfm_permission_lockdown": (
        _shell(
            "cd Documents/secure; chmod 644 public.txt; chmod 600 private.txt; chmod 755 script.sh;"
            " chmod 400 secret.key"
        ),
    ),
    "pcmanfm_symlink_farm": (
        _shell(
            "mkdir -p Desktop/shortcuts; for pair in report:txt data:csv image:png; do name=${pair%:*};"
            " ln -s ~/Documents/$name.${pair#*:} Desktop/shortcuts/${name}_link; done"
        ),
    ),
    "shotcut_set_theme_dark": (_close("shotcut"), _ini(_SHOTCUT, "General", theme="dark")),
    "shotcut_v2_default_profile_dv_pal": (_close("shotcut"), _ini(_SHOTCUT, "Settings", defaultProfile="dv_pal")),
    "thunderbird_change_display_name": (
        _close("thunderbird"),
        _thunderbird('user_pref("mail.identity.id1.fullName", "Alexandra Chen");'),
    ),
    "thunderbird_change_compose_font": (
        _close("thunderbird"),
        _thunderbird('user_pref("font.name.serif.x-western", "Georgia");', 'user_pref("msgcompose.font_size", "16");'),
    ),
    "vlc_gap_hotkey_customize_pause": (_close("vlc"), _ini("~/.config/vlc/vlcrc", "core", **{"key-play-pause": "p"})),
    "vlc_play_video_file": (
        _vlc("command=in_play&input=file:///home/user/Videos/sample.mp4"),
        _vlc("command=pl_repeat"),
    ),
}

#: Scores below 1 that a right solution has, because a check cannot pass.
SHARES: Mapping[str, float] = {
    # Audacity writes `PrefsVersion=` before the first section, which the verifier's parser refuses.
    "audacity_preference_default_sample_rate": 0.0,
    "audacity_theme_dark_preference": 0.0,
    # Its selector `td[data-date=15]` is not valid: an unquoted value does not begin with a digit.
    "chrome_local_calendar_event": 0.8,
    # The expected name has a space and no quotes, so the verifier expects its first word.
    "thunderbird_change_display_name": 0.0,
}
