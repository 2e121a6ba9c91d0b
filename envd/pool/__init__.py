"""Machines kept ready, and who gets them."""
