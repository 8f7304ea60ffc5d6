"""The toolchain of the `onnxruntime-qnn` wheel from PyPI."""
