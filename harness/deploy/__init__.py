"""Bringing files onto devices, each content once."""
