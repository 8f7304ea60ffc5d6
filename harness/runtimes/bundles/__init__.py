"""Bundles: the files of a runtime for a device, their sources, and checks of them."""
