"""Encodings, the meaning of integers in tensors: their files, and how they travel with a graph."""
