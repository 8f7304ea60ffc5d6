"""Diagnosis: what a build, a device or a failed run is about."""
