"""Export personal models to ONNX, without torch."""
