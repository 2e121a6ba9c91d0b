"""What runs in OSWorld's virtual environment: standard library alone, beside the `desktop_env` that is there."""
