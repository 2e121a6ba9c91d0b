"""Checkers under attack: almost right solutions, cheats, and repeated right ones, played on forks of one state."""
