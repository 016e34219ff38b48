"""The peers of our fleet: the same federated averaging on Flower's simulation and on a plain PyTorch loop.

``work`` is the common work in plain PyTorch; ``memory`` samples any command from outside, ours too.
"""
