"""Records, metrics and lists that people and programs read."""
