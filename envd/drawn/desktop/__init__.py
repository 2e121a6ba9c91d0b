"""The drawn desktop: windows, text, keyboard."""
