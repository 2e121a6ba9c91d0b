"""Keep spare machines and lease them to runs by fair share."""
