"""Many simulated devices on one machine or a cluster."""
