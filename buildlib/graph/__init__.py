"""Canonical float ONNX: its interface to Genie, its files, its making from a checkpoint."""
