"""Runtimes: what runs a container on a device."""
