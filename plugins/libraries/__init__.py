"""Genie and QNN for devices, listed and fetched."""
