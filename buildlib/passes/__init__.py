"""Passes over ONNX models: one a file, weights left where they lie."""
