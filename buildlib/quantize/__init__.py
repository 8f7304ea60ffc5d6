"""Quantization: calibration, the recipe of bits and grids, and writing QDQ models."""
