"""What a device can afford: memory, seconds, and the largest budget that fits."""
