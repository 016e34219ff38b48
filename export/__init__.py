"""Export of personal models to ONNX, without torch."""
