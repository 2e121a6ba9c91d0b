"""States that have what a task's checks name and nothing else. Runs in guests: imports nothing of envd.

`write(app, checks)` replaces or makes the files that the checks of a task name. A file loses all that no check asks
for, so a task that changes a document is not solved: the rest of the document is gone.
"""

import os
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

Words = list[str]


def write(app: str, checks: Sequence[dict[str, Any]]) -> None:
    """Make the state of one task."""
    by_path: defaultdict[str, list[tuple[str, Words, dict[str, Any]]]] = defaultdict(list)
    for check in checks:
        name, *words = shlex.split(check["command"])
        path = words[0] if words and words[0].startswith("/") else ""
        by_path[path].append((name, words[1:] if path else words, check))
    for path, named in by_path.items():
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            WRITERS[app](Path(path), named)


def _wanted(name: str, named: Sequence[tuple[str, Words, dict[str, Any]]]) -> list[Words]:
    return [words for each, words, check in named if each == name and check.get("expected", True) is True]


def _text(path: Path, named: Any) -> None:
    lines: dict[int, str] = {}
    for number, *words in _wanted("check-file-line", named):
        lines[int(number)] = " ".join(words)
    counts = [int(words[0]) for words in _wanted("check-file-line-count", named)]
    for each, _, check in named:
        if each == "file-line-count" and (found := re.search(r">=? *(\d+)", check.get("eval", ""))):
            counts.append(int(found[1]))
    last = max([*lines, *counts, 1])
    for words in _wanted("check-file-contains", named):
        text = " ".join(words)
        if not any(text in line for line in lines.values()):
            free = next((n for n in range(1, last + 1) if n not in lines), 0)
            if free == 0 and not counts:
                last = free = last + 1
            lines[free or last] = f"{lines.get(free or last, '')} {text}".strip()
    path.write_text("".join(f"{lines.get(n, '#')}\n" for n in range(1, last + 1)))


def _files(path: Path, named: Any) -> None:
    for name, words, check in named:
        expected = check.get("expected", True)
        if name == "check-dir-exists" and expected is True:
            path.mkdir(parents=True, exist_ok=True)
        elif name == "check-file-exists" and expected is False:
            subprocess.run(["rm", "-rf", path], check=True)
        elif name == "check-file-exists" and not path.exists():
            path.write_text("")
        elif name == "check-file-contains" and expected is True:
            path.write_text((path.read_text() if path.is_file() else "") + " ".join(words) + "\n")
        elif name == "check-symlink":
            path.unlink(missing_ok=True)
            path.symlink_to(words[0])
        elif name == "check-extension-match":
            path.mkdir(parents=True, exist_ok=True)
            if not list(path.glob(f"*{words[0]}")):
                (path / f"x{words[0]}").write_text("")
    for words in _wanted("check-file-count", named):
        path.mkdir(parents=True, exist_ok=True)
        for number in range(int(words[0]) - len(list(path.iterdir()))):
            (path / f"filler{number}.txt").write_text("")
    for words in _wanted("check-permissions", named):
        if not path.exists():
            path.write_text("")
        path.chmod(int(words[0], 8))


_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:inkscape="http://www.inkscape.org/namespaces/inkscape"'
    ' xmlns:xlink="http://www.w3.org/1999/xlink"'
)


def _svg(path: Path, named: Any) -> None:
    width, height = (_wanted("check-page-size", named) or [["800", "600"]])[0][:2]
    styles: defaultdict[str, dict[str, str]] = defaultdict(dict)
    attributes: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for identity, *_ in _wanted("check-element-exists", named):
        styles[identity] = {}
    for identity, name, *value in _wanted("check-style-property", named):
        styles[identity][name] = " ".join(value)
    for identity, name, *value in _wanted("check-element-attribute", named):
        styles[identity], attributes[identity][name] = styles[identity], " ".join(value)
    kinds = [words[0] for words in _wanted("check-has-element-type", named)]
    parts = []
    for identity, style in styles.items():
        text = ";".join(f"{name}:{value}" for name, value in style.items())
        more = "".join(f" {name}={quoteattr(value)}" for name, value in attributes[identity].items())
        parts.append(f"<{kinds.pop() if kinds else 'path'} id={quoteattr(identity)} style={quoteattr(text)}{more}/>")
    parts += [f"<{kind}/>" for kind in kinds]
    parts += [
        f'<g inkscape:groupmode="layer" inkscape:label={quoteattr(" ".join(words))}/>'
        for words in _wanted("check-layer-exists", named)
    ]
    parts += [f"<text>{escape(' '.join(words))}</text>" for words in _wanted("check-text-contains", named)]
    path.write_text(f'{_SVG} width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>')


def _drawio(path: Path, named: Any) -> None:
    pages = max([int(words[0]) for words in _wanted("check-page-count", named)] + [1])
    count = {
        kind: {int(words[1]) if len(words) > 1 else 0: int(words[0]) for words in _wanted(f"check-{kind}-count", named)}
        for kind in ("vertex", "edge")
    }
    labels = [" ".join(words) for words in _wanted("check-label-exists", named)]
    style: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for identity, name, *value in _wanted("check-style-property", named):
        style[identity][name] = " ".join(value)
    text = ""
    for page in range(pages):
        identities = list(style) if page == 0 else []
        wanted = count["vertex"].get(page, len(labels) if page == 0 else 1)
        own = [labels.pop(0) for _ in range(min(wanted, len(labels)))]
        if page == pages - 1 and labels and own:
            own[-1] += "".join(f" {label}" for label in labels)
        own += [""] * (wanted - len(own))
        cells = '<mxCell id="0"/><mxCell id="1" parent="0"/>'
        for number, label in enumerate(own):
            identity = identities.pop(0) if identities else f"v{number}"
            look = "".join(f"{name}={value};" for name, value in style[identity].items())
            cells += f'<mxCell id="{identity}" value={quoteattr(label)} style={quoteattr(look)} vertex="1" parent="1"/>'
        for number in range(count["edge"].get(page, 0)):
            cells += f'<mxCell id="e{number}" edge="1" parent="1"/>'
        text += f'<diagram name="Page-{page + 1}"><mxGraphModel><root>{cells}</root></mxGraphModel></diagram>'
    path.write_text(f"<mxfile>{text}</mxfile>")


def _vault(path: Path, named: Any) -> None:
    notes: defaultdict[str, list[tuple[str, Words]]] = defaultdict(list)
    for name, words, check in named:
        if check.get("expected", True) is True and name.startswith("check-note"):
            notes[words[0]].append((name, words[1:]))
        elif name == "check-folder-exists":
            (path / words[0]).mkdir(parents=True, exist_ok=True)
    for note, parts in notes.items():
        found = list(path.rglob(f"{note}.md")) or [path / f"{note.removesuffix('.md')}.md"]
        fields = [f"{words[0]}: {' '.join(words[1:])}" for name, words in parts if name == "check-note-has-frontmatter"]
        body = [f"#{words[0].lstrip('#')}" for name, words in parts if name == "check-note-has-tag"]
        body += [f"[[{words[0]}]]" for name, words in parts if name == "check-note-links-to"]
        body += [
            f"{'#' * int(words[1]) if len(words) > 1 else '#'} {words[0]}"
            for name, words in parts
            if name == "check-note-has-heading"
        ]
        body += [" ".join(words) for name, words in parts if name == "check-note-contains"]
        head = ["---", *fields, "---"] if fields else []
        found[0].parent.mkdir(parents=True, exist_ok=True)
        found[0].write_text("\n".join([*head, *body, ""]))


def _picture(path: Path, named: Any) -> None:
    from PIL import Image

    width, height = (_wanted("check-file-dimensions", named) or [["200", "200"]])[0][:2]
    mode = (_wanted("check-file-mode", named) or [["RGB"]])[0][0]
    picture = Image.new("RGB" if mode not in {"RGBA", "L"} else mode, (int(width), int(height)))
    for words in _wanted("check-pixel-color-file", named):
        x, y, *colour = map(int, words[:5])
        if mode != "L":
            picture.putpixel((x, y), (*colour, 255) if mode == "RGBA" else tuple(colour))
    form = (_wanted("check-file-format", named) or [[""]])[0][0]
    picture.save(path, **({"format": form} if form else {}))


def _cloud(path: Path, named: Any) -> None:
    counts = _wanted("check-point-count", named) + _wanted("check-point-count-at-least", named)
    count = int(counts[0][0]) if counts else 10
    form = (_wanted("check-ply-format", named) or [["ascii"]])[0][0]
    if path.suffix == ".ply":
        kind = "ascii" if form == "ascii" else form
        head = f"ply\nformat {kind} 1.0\nelement vertex {count}\nproperty float x\nproperty float y\nproperty float z\n"
        data = b"0 0 0\n" * count if form == "ascii" else bytes(12 * count)
        path.write_bytes(head.encode() + b"end_header\n" + data)
    else:
        path.write_text("0 0 0\n" * count)


def _project(path: Path, named: Any) -> None:
    if path.suffix not in {".kdenlive", ".mlt"}:
        _video(path, named)
        return
    width, height = (_wanted("check-resolution", named) or [["1920", "1080"]])[0][:2]
    rate = (_wanted("check-fps", named) or [["25"]])[0][0]
    clips = [words[0] for words in _wanted("check-clip-exists", named)]
    counts = _wanted("check-clip-count", named)
    clips += [f"/home/user/Videos/x{number}.mp4" for number in range((int(counts[0][0]) if counts else 0) - len(clips))]

    def service(tag: str, name: str) -> str:
        return f'<{tag}><property name="mlt_service">{escape(name)}</property></{tag}>'

    text = "".join(
        f'<producer id="c{n}"><property name="resource">{escape(clip)}</property></producer>'
        for n, clip in enumerate(clips)
    )
    for check in ("check-effect-exists", "check-filter-exists"):
        text += "".join(service("filter", words[0]) for words in _wanted(check, named))
    text += "".join(service("transition", words[0]) for words in _wanted("check-transition-exists", named))
    profile = f'<profile width="{width}" height="{height}" frame_rate_num="{rate}" frame_rate_den="1"/>'
    path.write_text(f"<mlt>{profile}{text}<playlist/></mlt>")


def _video(path: Path, named: Any) -> None:
    width, height = (_wanted("check-export-resolution", named) or [["320", "240"]])[0][:2]
    source = f"color=black:s={width}x{height}:d=4"
    subprocess.run(["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", source, path], check=False)


def _sound(path: Path, named: Any) -> None:
    if path.suffix == ".aup":
        return
    rate = (_wanted("check-export-sample-rate", named) or [["44100"]])[0][0]
    channels = (_wanted("check-export-channels", named) or [["1"]])[0][0]
    least = (_wanted("check-export-duration-min", named) or [["2"]])[0][0]
    most = (_wanted("check-export-duration-max", named) or [[str(float(least) + 0.2)]])[0][0]
    seconds = (float(least) + float(most)) / 2
    source = f"anoisesrc=d={seconds}:a=0.05:r={rate}"
    argv = ["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", source, "-ac", channels, "-ar", rate, str(path)]
    subprocess.run(argv, check=False)


WRITERS = {
    "gedit": _text,
    "pcmanfm": _files,
    "inkscape": _svg,
    "drawio": _drawio,
    "obsidian": _vault,
    "gimp": _picture,
    "cloudcompare": _cloud,
    "kdenlive": _project,
    "shotcut": _project,
    "audacity": _sound,
}


def empty(checks: Sequence[dict[str, Any]]) -> None:
    """Make all files that checks name and that are missing, without content."""
    for check in checks:
        for word in shlex.split(check["command"])[1:2]:
            if word.startswith("/") and not os.path.lexists(word):
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).write_text("")
