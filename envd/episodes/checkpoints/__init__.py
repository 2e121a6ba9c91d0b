"""Checkpoints: states of episodes that are stored on disk, and episodes that begin in such a state."""
