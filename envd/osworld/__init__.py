"""OSWorld's tasks with OSWorld's own setup and evaluators, and our machines under OSWorld's own DesktopEnv."""
