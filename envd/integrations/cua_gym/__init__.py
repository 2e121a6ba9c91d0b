"""Bundles of CUA-Gym as tasks."""
