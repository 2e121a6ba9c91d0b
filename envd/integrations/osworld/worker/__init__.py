"""Code that runs in OSWorld's virtual environment: it uses the standard library and `desktop_env` only."""
