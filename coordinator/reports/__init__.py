"""Records, metrics and lists for users and programs."""
