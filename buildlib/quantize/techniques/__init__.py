"""Techniques that change float weights so that they quantize better."""
