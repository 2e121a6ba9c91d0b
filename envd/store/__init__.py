"""What a daemon must still know after it was killed: one SQLite database in its state directory."""
