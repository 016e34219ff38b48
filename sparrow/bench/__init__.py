"""Comparison of methods on simulated devices, with tables and plots."""
