"""The templates of the built-in suite, for the desktop image: user `user`, screen 1280x800.

One module per domain. Oracles use the keyboard if possible, and coordinates only in tasks about the mouse: the image
opens each application's window at a fixed position. Doing nothing scores 0 in every task: no setup satisfies its own
checker. Oracles wait for a window or a file where work continues after the screen has responded, or a program starts.
"""

from envd.tasks.suites.desktop import editor, files, flows, images, settings, spreadsheet, terminal
from envd.tasks.suites.desktop.parts import DESKTOP

__all__ = ["DESKTOP", "editor", "files", "flows", "images", "settings", "spreadsheet", "terminal"]
