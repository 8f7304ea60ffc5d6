"""Passes over ONNX models; weights stay where they lie."""
