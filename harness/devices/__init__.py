"""Devices that a harness can run commands on and exchange files with."""
