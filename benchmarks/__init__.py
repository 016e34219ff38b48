"""The bench, the demo, and the measurements of ``docs/results`` with the commands that made them."""
