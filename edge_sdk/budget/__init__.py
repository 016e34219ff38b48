"""The largest budget that a device can afford: one prediction of memory and seconds, and one search."""
