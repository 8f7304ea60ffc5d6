"""What compiles ONNX to context binaries: one Protocol, one file for each toolchain behind it."""
