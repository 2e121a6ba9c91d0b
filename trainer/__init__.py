"""The trainer side: clients and rollouts that meet envd over gRPC only."""
