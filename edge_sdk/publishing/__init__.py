"""A torch model as a manifest and as an ONNX skeleton."""
