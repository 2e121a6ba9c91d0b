"""OSWorld's tasks with OSWorld's own setup and evaluators, and our machines under OSWorld's own DesktopEnv."""

#: The task whose machines `DesktopEnv` is given: one without setup.
DESKTOP_TASK = "osworld/desktop"
