"""Bundles: what a runtime needs on a device, where it comes from, and whether it fits."""
