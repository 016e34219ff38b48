"""From a personal model to an ONNX file, with onnx and numpy alone: what runs here has no torch."""
