"""Programs that need a checkout."""
