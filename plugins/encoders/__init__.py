"""Builds of text encoders."""
