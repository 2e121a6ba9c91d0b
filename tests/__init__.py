"""Tests, and the programs and fixtures that they share."""
