"""Tools for task authors: verify, attack and record tasks, and play the demo."""
