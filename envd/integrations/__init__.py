"""Drop-ins for other systems: OSWorld's tasks and provider, and the HTTP protocols of earlier environments."""
