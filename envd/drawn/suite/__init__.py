"""The templates of the suite for drawn desktops, which a small model can learn from pixels.

A task is one to three clauses ("press kite, then tick lemon") on one or two forms. Words, values, places and colours
come from the seed. Each clause kind occurs in training templates; the held-out templates combine kinds in ways that
training never shows. Everything fits on a screen of 512x320.
"""

from envd.drawn.suite import pages, templates
from envd.drawn.suite.desk import DRAWN

__all__ = ["DRAWN", "pages", "templates"]
