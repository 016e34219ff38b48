"""The bench: methods side by side on simulated devices, with tables and pictures of what was found."""
