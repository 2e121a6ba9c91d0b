"""The accessibility tree: read from AT-SPI by a helper process, because AT-SPI calls hang with the applications."""
