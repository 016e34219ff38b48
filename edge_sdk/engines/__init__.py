"""Training without PyTorch: the training step as a graph, made fast, and optimisers in numpy."""
