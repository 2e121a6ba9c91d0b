"""OSWorld: its tasks with its own setup and evaluators, and our machines as a provider of its DesktopEnv."""

#: The task of the episodes that serve as machines of `DesktopEnv`. It has no setup.
DESKTOP_TASK = "osworld/desktop"
