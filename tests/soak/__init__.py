"""Soak test: random episodes, faults and killed clients for some time, then an account of the result (`make soak`)."""
