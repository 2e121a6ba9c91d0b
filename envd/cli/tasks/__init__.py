"""`envd tasks`: look at tasks, check their files, fetch their assets, and play their oracles."""
