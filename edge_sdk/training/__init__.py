"""Local training with frozen parameters, and evaluation, by PyTorch."""
