"""What trains a model on a device without PyTorch: the training step as a graph, made fast (``passes``)."""
