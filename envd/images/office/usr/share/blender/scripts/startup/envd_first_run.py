"""No splash screen, and with it no questions of the first start."""

import bpy


def register():
    bpy.context.preferences.view.show_splash = False


def unregister():
    pass
