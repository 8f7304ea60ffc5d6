"""Hosts reached over SSH."""
