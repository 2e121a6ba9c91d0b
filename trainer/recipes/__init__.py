"""Recipes: a YAML file and a launcher each. `catalogue.py` reads them, and refuses what their plug-in would refuse."""
