"""State that survives the daemon: one SQLite database in its state directory."""
