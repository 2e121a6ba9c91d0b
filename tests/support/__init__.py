"""Fixtures, stubs and servers that tests share."""
