"""Runtimes: programs that run a container on a device."""
