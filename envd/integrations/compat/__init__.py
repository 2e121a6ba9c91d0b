"""Clients of other systems on envd's desktops: HTTP servers of their protocols, as clients of a daemon."""
