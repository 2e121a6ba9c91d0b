"""Drawn desktops in worker processes, so that the daemon's own process does not draw.

Each worker runs a `FakeHypervisor` of its own; `DrawingWorkers` is the daemon's side. Forks of a capture are in the
worker that captured it. A template is stored in the daemon, and any snapshot is copied to another worker when a machine
there needs it.
"""
