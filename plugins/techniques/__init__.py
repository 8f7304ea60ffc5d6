"""Techniques of quantization that no default build uses."""
