"""Any supported ONNX export of a decoder, rewritten to the canonical graph."""
