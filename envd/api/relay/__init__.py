"""Serve the contract by relaying calls to shards: daemons that each have a part of the machines."""
