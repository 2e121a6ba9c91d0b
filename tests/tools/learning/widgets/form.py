"""Open a form of the drawn suite as a window of GTK, and write its state as the drawn window does.

A program of a desktop image with `gir1.2-gtk-3.0`: `python3 form.py FORM.json plain|coloured`. A plain form has GTK's
own theme, a coloured one the colours of the drawn form. Chips and bins have no counterpart.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gi

gi.require_version("Gtk", "3.0")
from gi.repository import Gdk, Gtk  # noqa: E402 -- after require_version

#: Of a drawn window; widgets' places count from the window's top.
_TITLE_HEIGHT_PX = 28
#: From this sum of red, green and blue on, a button's text is dark.
_LIGHT = 480
_LOOK = """
* { font: 19px 'DejaVu Sans'; padding: 0 2px; min-height: 0; min-width: 0; -GtkComboBox-appears-as-list: 1; }
combobox arrow { min-width: 16px; min-height: 16px; }
"""
_COLOURS = """
window, label, checkbutton {{ background: rgb{face}; color: rgb{ink}; }}
button, button label {{ background: rgb{accent}; color: {on_accent}; }}
combobox button, combobox button *, entry {{ background: white; color: black; }}
"""


class Form(Gtk.Window):  # type: ignore[misc]
    """The window; `path` with `.state` appended is its state's file."""

    def __init__(self, path: Path, *, is_coloured: bool) -> None:
        form = json.loads(path.read_text(encoding="utf-8"))
        super().__init__(title=form["title"])
        self._state_path = path.with_name(f"{path.name}.state")
        self._values: dict[str, str] = {}
        self._pressed: list[str] = []
        self._is_open = True
        colours = {key: tuple(form[key]) for key in ("face", "ink", "accent")}
        on_accent = "white" if sum(form["accent"]) < _LIGHT else "black"
        style(_LOOK + (_COLOURS.format(**colours, on_accent=on_accent) if is_coloured else ""))
        fixed = Gtk.Fixed()
        self.add(fixed)
        for widget in form["widgets"]:
            item = self._widget(widget)
            item.set_size_request(widget["w"], widget["h"])
            fixed.put(item, widget["x"], widget["y"] - _TITLE_HEIGHT_PX)
        self.set_resizable(False)
        fixed.set_size_request(form["w"], form["h"] - _TITLE_HEIGHT_PX)
        self.connect("delete-event", self._closed)
        self.move(form["x"], form["y"])
        self.show_all()
        self.set_focus(None)
        self._save()

    def _widget(self, widget: dict[str, Any]) -> Gtk.Widget:
        name = widget["name"]
        match widget["kind"]:
            case "label":
                return Gtk.Label(label=name, xalign=0.0)
            case "button":
                item = Gtk.Button(label="" if widget.get("fill") else name)
                item.connect("clicked", self._press, name)
                if fill := widget.get("fill"):
                    item.set_name("filled" + "".join(f"{part:02x}" for part in fill))
                    # The label, too: the rules of a coloured window give it the colour of other buttons.
                    style(f"#{item.get_name()}, #{item.get_name()} label {{ background: rgb{tuple(fill)}; }}")
            case "box":
                item = Gtk.CheckButton(label=name)
                item.connect("toggled", lambda box: self._set(name, "on" if box.get_active() else "off"))
                self._values[name] = "off"
            case "field":
                item = Gtk.Entry(text=widget["text"], width_chars=1, editable=not widget["locked"])
                item.set_can_focus(not widget["locked"])
                item.connect("changed", lambda entry: self._set(name, entry.get_text()))
                self._values[name] = widget["text"]
            case "menu":
                item = Gtk.ComboBoxText()
                for option in widget["options"]:
                    item.append_text(option)
                item.connect("changed", lambda menu: self._set(name, menu.get_active_text()))
                self._values[name] = ""
            case kind:
                raise ValueError(f"{name}: no widget of GTK for {kind}")
        return item

    def _press(self, _button: Gtk.Button, name: str) -> None:
        self._pressed.append(name)
        self._save()

    def _closed(self, *_event: object) -> bool:
        self._is_open = False
        self._save()
        Gtk.main_quit()
        return False

    def _set(self, name: str, value: str) -> None:
        self._values[name] = value
        self._save()

    def _save(self) -> None:
        lines = [f"{name}: {value}" for name, value in self._values.items()]
        lines += [f"pressed: {' '.join(self._pressed)}", f"open: {'yes' if self._is_open else 'no'}"]
        new = self._state_path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.replace(self._state_path)


def style(css: str) -> None:
    """Add rules to those of this program's windows."""
    provider = Gtk.CssProvider()
    provider.load_from_data(css.encode())
    Gtk.StyleContext.add_provider_for_screen(Gdk.Screen.get_default(), provider, Gtk.STYLE_PROVIDER_PRIORITY_USER)


if __name__ == "__main__":
    Form(Path(sys.argv[1]), is_coloured=sys.argv[2] == "coloured")
    Gtk.main()
