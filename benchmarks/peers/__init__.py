"""The peers of our fleet: the same federated averaging on Flower's simulation and on a plain PyTorch loop.

``work`` is what all of them do, in plain PyTorch; ``memory`` watches any command from outside, ours too.
"""
