"""Parity: the same scripts on two kinds of desktops, whose scores and screens are compared task by task."""
