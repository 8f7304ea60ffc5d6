"""Devices, deployment, runtimes, the results store and the command line."""
