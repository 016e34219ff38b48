"""Comparisons and tables: what ``docs/results`` shows, with the commands that made it."""
