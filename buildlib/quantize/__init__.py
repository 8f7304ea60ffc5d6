"""Encodings: their file format, their calibration, and their application as QDQ."""
