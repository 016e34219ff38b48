"""What trains a model on a device: ONNX Runtime with the training step as a graph (``onnx``), or PyTorch (``torch``)."""
