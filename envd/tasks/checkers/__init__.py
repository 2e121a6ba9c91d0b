"""Checkers: what a task looks at in a guest, and how it judges what it finds. A module for each subject."""
