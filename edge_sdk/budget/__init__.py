"""The largest budget that a device can afford: predictions of memory and seconds, and a search."""
