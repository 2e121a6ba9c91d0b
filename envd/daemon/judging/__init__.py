"""Processes that judge what guests made, apart from the daemon."""
