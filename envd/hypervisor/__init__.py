"""Machines: the protocol, the libvirt driver, the fake, images."""
