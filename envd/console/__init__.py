"""The console: a page that shows all episodes live, and replays recorded ones. Read only."""
