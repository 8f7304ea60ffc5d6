"""Toolchains that compile ONNX to context binaries, behind one Protocol."""
