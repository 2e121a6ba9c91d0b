"""Wrong solutions of tasks of OpenComputer, each with the instruction that it breaks in its name.

`python -m tests.opencomputer.mutants > FILE` prints the oracles with these mutants, for `envd tasks attack --oracles`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from envd.authoring.attack.mutants import Family
from envd.tasks.oracle import parse_action, write_action
from tests.opencomputer.oracles import (
    ORACLES,
    SHARES,
    Steps,
    _close,
    _python,
    _rewrite_zip,
    _shell,
    _thunderbird,
    _uno,
    _vlc,
)


class Wrong(NamedTuple):
    """A wrong solution."""

    name: str
    family: Family
    steps: Steps
    after_oracle: bool = False


def _almost(name: str, *steps: Any) -> Wrong:
    return Wrong(name, Family.ALMOST, steps)


def _damage(name: str, *steps: Any) -> Wrong:
    return Wrong(name, Family.DAMAGE, steps, after_oracle=True)


def _early(name: str, *steps: Any) -> Wrong:
    return Wrong(name, Family.EARLY, steps, after_oracle=True)


def _hedged(name: str, *steps: Any, after_oracle: bool = False) -> Wrong:
    return Wrong(name, Family.HEDGED, steps, after_oracle)


def _replaced(task: str, old: str, new: str) -> Any:
    """Return a task's oracle with another text in its commands or keys."""
    text = json.dumps([[write_action(each) for each in step] for step in ORACLES[task]])
    changed = text.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])
    assert changed != text, (task, old)
    return [tuple(parse_action(each) for each in step) for step in json.loads(changed)]


def _document(lines: str) -> tuple[Any, ...]:
    return _uno(lines)


_FILL = "sheet = doc.Sheets.getByName({sheet!r})\n"
_ONE_BOX = """
from com.sun.star.awt import Point, Size
page = doc.getDrawPages().getByIndex(0)
shape = doc.createInstance("com.sun.star.drawing.RectangleShape")
shape.setPosition(Point(1000, 1000))
shape.setSize(Size(18000, 5000))
page.add(shape)
shape.setString({text!r})
"""
_SAVE_FLOWCHART = 'doc.storeAsURL("file:///home/user/Documents/flowchart.odg", (value("FilterName", "draw8"),))'
_NO_CHORDS = r"""
            changed = re.sub(r"<Chord>.*?</Chord>", "", text, flags=re.S)"""
_PEDAL_LATE = """
            mark = '<Spanner type="Pedal"><Pedal/><next><location><measures>1</measures></location></next></Spanner>'
            head, _, tail = text.rpartition("<Chord>")
            changed = head + mark + "<Chord>" + tail"""

WRONG: Mapping[str, Sequence[Wrong]] = {
    "audacity_export_ogg_vorbis": (
        _almost(
            "a tone instead of the voice",
            _shell("ffmpeg -v error -y -f lavfi -i sine=frequency=440:duration=3 -c:a libvorbis Music/voice.ogg"),
        ),
        _damage("the source voice.wav deleted", _shell("rm Music/voice.wav")),
    ),
    "calc_conditional_formatting_sales_heatmap": (
        _damage(
            "all sales set to 1",
            _document(
                _FILL.format(sheet="Sales") + "for row in range(1, 13):\n  for c in range(1, 5):\n"
                "    sheet.getCellByPosition(c, row).Value = 1"
            ),
        ),
        _almost(
            "conditions without colours or rules that apply",
            _document(
                _FILL.format(sheet="Sales")
                + """for name in ("B2:E13", "F2:F13"):
    ranges = doc.createInstance("com.sun.star.sheet.SheetCellRanges")
    ranges.addRangeAddress(sheet.getCellRangeByName(name).RangeAddress, False)
    sheet.ConditionalFormats.createByRange(ranges)
    made = sheet.ConditionalFormats.getConditionalFormats()[-1]
    made.createEntry(0, 0)
    entry = made.getByIndex(0)
    entry.StyleName, entry.Formula1, entry.Operator = "Default", "999999999", 1"""
            ),
        ),
    ),
    "calc_inventory_sort_filter": (
        _damage(
            "categories of all items emptied",
            _document(
                _FILL.format(sheet="Inventory") + "for row in range(1, 21):\n"
                '    sheet.getCellByPosition(1, row).String = ""'
            ),
        ),
        _almost(
            "numbers instead of formulas below E2",
            _document(
                _FILL.format(sheet="Inventory")
                + """head = sheet.getCellRangeByName("E1")
head.String, head.CharWeight = "Total Value", 150.0
for row in range(2, 22):
    sheet.getCellRangeByName(f"E{row}").Formula = f"=C{row}*D{row}"
field = uno.createUnoStruct("com.sun.star.table.TableSortField")
field.Field, field.IsAscending = 4, False
fields = uno.Any("[]com.sun.star.table.TableSortField", (field,))
sheet.getCellRangeByName("A1:E21").sort((value("SortFields", fields), value("ContainsHeader", True)))
for row in range(3, 22):
    sheet.getCellRangeByName(f"E{row}").Value = 1000 - row"""
            ),
        ),
        _hedged(
            "the header has two names",
            *_replaced("calc_inventory_sort_filter", '"Total Value", 150', '"Total Value or Sum", 150'),
        ),
    ),
    "cloudcompare_ply_to_xyz_ascii": (
        _almost("800 points at the origin", _shell("for n in $(seq 800); do echo 0 0 0; done > Documents/lidar.xyz")),
        _damage("the source lidar.ply deleted", _shell("rm Documents/lidar.ply")),
    ),
    "darktable_import_rate_export_jpeg": (
        _almost(
            "an export of another picture",
            *ORACLES["darktable_import_rate_export_jpeg"],
            _shell("ffmpeg -v error -y -f lavfi -i color=black:s=64x64 -frames:v 1 Pictures/exports/sunset_out.jpg"),
        ),
    ),
    "draw_org_chart": (
        _almost(
            "one rectangle with all four texts, and no connector",
            _document(_ONE_BOX.format(text="CEO - Alice\nCTO - Bob\nCFO - Carol\nCOO - Dave")),
        ),
        _almost(
            "four rectangles and no connector",
            *_replaced("draw_org_chart", "connect(head, box(text, x, 7000))", "head = box(text, x, 7000)"),
        ),
        _hedged("two names for the head", *_replaced("draw_org_chart", "CEO - Alice", "CEO - Alice or Bob")),
    ),
    "draw_software_flowchart": (
        _almost(
            "one rectangle with the words in reverse order, and no connector",
            _document(_ONE_BOX.format(text="Deploy Test Implement Design Start") + _SAVE_FLOWCHART),
        ),
    ),
    "freecad_document_comment_metadata": (
        _hedged(
            "two comments",
            _close("freecad"),
            _rewrite_zip(
                "~/Documents/metadata.FCStd",
                "Document.xml",
                """changed = re.sub(r'(name="Comment"[^>]*>\\s*<String value=")', r"\\1Prototype v1 or v2", text)""",
            ),
        ),
    ),
    "gedit_create_bash_script": (
        _almost(
            "a script of comments and no command",
            _shell(
                "printf '%s\\n' '#!/bin/bash' '# BACKUP_DIR' '# SOURCE_DIR' '# mkdir -p'"
                " '# Backup completed successfully' '#' '#' > Documents/backup.sh"
            ),
        ),
        _almost(
            "another directory is backed up",
            _shell(
                "printf '%s\\n' '#!/bin/bash' \"BACKUP_DIR='/tmp/x'\" \"SOURCE_DIR='/etc'\" '' 'mkdir -p $BACKUP_DIR'"
                " 'rm -rf $SOURCE_DIR' 'echo \"Backup completed successfully\"' > Documents/backup.sh"
            ),
        ),
    ),
    "gedit_edit_csv_data": (
        _almost(
            "rows in another order, with quotes around one",
            _shell(
                "printf '%s\\n' Name,Age,Salary,Department David,28,55000,Sales Charlie,35,85000,Engineering"
                " '\"Bob,25,58000,Marketing\"' Alice,30,72000,Engineering > Documents/employees.csv"
            ),
        ),
        _hedged(
            "each row has two departments",
            _shell(
                "printf '%s\\n' Name,Age,Salary,Department 'Alice,30,72000,Engineering or Sales'"
                " 'Bob,25,58000,Marketing or Sales' 'Charlie,35,85000,Engineering or Sales'"
                " 'David,28,55000,Sales or Marketing' > Documents/employees.csv"
            ),
        ),
    ),
    "gimp_resize_export_jpeg": (
        _almost(
            "a black picture of the right size",
            _shell("ffmpeg -v error -y -f lavfi -i color=black:s=640x480 -frames:v 1 Documents/landscape_small.jpg"),
        ),
        _damage("the source landscape.png deleted", _shell("rm Documents/landscape.png")),
    ),
    "impress_add_transitions_to_slides": (
        _damage(
            "all texts of the slides deleted",
            _document(
                "for page in [doc.getDrawPages().getByIndex(n) for n in range(4)]:\n"
                "    for n in range(page.getCount()):\n"
                "        shape = page.getByIndex(n)\n"
                "        if hasattr(shape, 'setString'):\n"
                "            shape.setString('')"
            ),
        ),
        _hedged(
            "two notes",
            *_replaced(
                "impress_add_transitions_to_slides",
                "Ask for questions and distribute business cards.",
                "Ask for questions and distribute business cards. Or distribute nothing.",
            ),
        ),
    ),
    "inkscape_edit_svg_styles": (
        _damage(
            "the circle moved off the page",
            _shell('sed -i \'s/cx="[^"]*"/cx="-9000"/\' Documents/drawing.svg; grep -q 9000 Documents/drawing.svg'),
        ),
        _hedged(
            "the text has two wordings",
            *_replaced("inkscape_edit_svg_styles", "Styled Shapes", "Styled Shapes or Plain Shapes"),
        ),
    ),
    "inkscape_resize_and_add_paths": (
        _almost(
            "one path instead of two",
            *_replaced("inkscape_resize_and_add_paths", '<path id="b" d="M 100,100 C 120,150 180,90 200,120"/>', ""),
        ),
        _damage(
            "the green rectangle deleted",
            _python(
                "import re\npath = 'Documents/landscape.svg'\ntext = open(path).read()\n"
                "changed = re.sub(r'<rect.*?/>', '', text, flags=re.S)\nassert changed != text\n"
                "open(path, 'w').write(changed)"
            ),
        ),
    ),
    "kdenlive_project_with_effects": (
        _almost(
            "clip and effect named in the project, neither on the timeline",
            _close("kdenlive"),
            _python(
                "path = 'Documents/effects_project.kdenlive'\ntext = open(path).read()\n"
                "prop = lambda name, value: f'<property name=\"{name}\">{value}</property>'\n"
                "more = '<producer id=\"c0\">' + prop('resource', '/home/user/Videos/sample.mp4')"
                " + prop('mlt_service', 'avformat') + '</producer><filter id=\"f0\">' + prop('mlt_service',"
                " 'frei0r.glow') + prop('kdenlive_id', 'frei0r.glow') + '</filter>'\n"
                "at = text.index('<playlist')\nopen(path, 'w').write(text[:at] + more + text[at:])"
            ),
        ),
    ),
    "krita_enable_python_plugin": (_damage("the picture's file emptied", _shell(": > Documents/plugin_test.kra")),),
    "libreoffice_writer_find_replace": (
        _damage(
            "the contract is replaced by the two expected texts",
            _document('doc.Text.setString("GlobalTech Industries 2026")'),
        ),
        _hedged(
            "two names",
            *_replaced(
                "libreoffice_writer_find_replace", '"GlobalTech Industries"', '"GlobalTech Industries or Other Corp"'
            ),
        ),
    ),
    "libreoffice_writer_insert_images": (
        _almost(
            "the first image twice",
            *_replaced("libreoffice_writer_insert_images", '("photo1", "photo2")', '("photo1", "photo1")'),
        ),
        _damage(
            "the existing text deleted",
            _document(
                "paragraphs = doc.Text.createEnumeration()\nwhile paragraphs.hasMoreElements():\n"
                "    portions = paragraphs.nextElement().createEnumeration()\n"
                "    while portions.hasMoreElements():\n        portion = portions.nextElement()\n"
                "        if portion.TextPortionType == 'Text':\n            portion.setString('')"
            ),
        ),
    ),
    "libreoffice_writer_report_with_headers_footers": (
        _damage("the report's text deleted", _document("doc.Text.setString('')")),
    ),
    "musescore3_change_time_signature": (
        _damage("all notes deleted", _rewrite_zip("~/Documents/waltz_sketch.mscz", ".mscx", _NO_CHORDS)),
    ),
    "musescore3_gap_pedal_marks": (
        _almost(
            "the pedal at the end instead of measure 1",
            _close("mscore3"),
            _rewrite_zip("~/Documents/pedal_study.mscz", ".mscx", _PEDAL_LATE),
        ),
    ),
    "pcmanfm_permission_lockdown": (
        _damage(
            "all four files emptied",
            _shell(
                "cd Documents/secure; chmod u+w *; for f in *; do : > $f; done; chmod 644 public.txt;"
                " chmod 600 private.txt; chmod 755 script.sh; chmod 400 secret.key"
            ),
        ),
    ),
    "pcmanfm_symlink_farm": (
        _damage("the linked files deleted", _shell("rm Documents/report.txt Documents/data.csv Documents/image.png")),
        _hedged(
            "a fourth link under the name of a hidden file",
            _shell("ln -s ~/Documents/data.csv Desktop/shortcuts/.report_link"),
            after_oracle=True,
        ),
    ),
    "shotcut_set_theme_dark": (
        _hedged(
            "the theme is set twice, light last",
            _shell("sed -i '/^theme=dark/a theme=light' .config/Meltytech/Shotcut.conf"),
            after_oracle=True,
        ),
        _damage("the project's file deleted", _shell("rm Documents/empty.mlt")),
    ),
    "thunderbird_change_compose_font": (
        _almost(
            "the font alone, no size",
            _close("thunderbird"),
            _thunderbird('user_pref("font.name.serif.x-western", "Georgia");'),
        ),
        _hedged(
            "Georgia, and Arial last",
            _thunderbird('user_pref("font.name.serif.x-western", "Arial");'),
            after_oracle=True,
        ),
    ),
    "vlc_play_video_file": (_early("stopped at the end", _vlc("command=pl_stop")),),
}


def lines() -> Iterator[dict[str, Any]]:
    """Yield the lines of the file; without tasks whose oracle cannot score 1."""
    for name, steps in ORACLES.items():
        if name not in SHARES and name != "vlc_gap_hotkey_customize_pause":
            wrong = [
                {**each._asdict(), "family": each.family.value, "steps": _written(each.steps)}
                for each in WRONG.get(name, ())
            ]
            yield {"task_id": f"opencomputer/{name}", "steps": [*_written(steps), ["done"]], "mutants": wrong}


def _written(steps: Any) -> list[Any]:
    return [[each if isinstance(each, dict) else write_action(each) for each in step] for step in steps]


def main() -> None:
    """Print the lines."""
    description = "Print OpenComputer's oracles with wrong solutions, a JSON line for each task."
    argparse.ArgumentParser(description=description).parse_args()
    for line in lines():
        print(json.dumps(line))


if __name__ == "__main__":
    main()
