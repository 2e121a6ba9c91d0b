"""Formats that tasks come in, each read into `envd.tasks.model.Task`. A module for each."""
