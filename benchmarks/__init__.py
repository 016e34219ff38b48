"""The demo, and the measurements of ``docs/results`` with their rows and the commands that made them."""
