"""Dialogs that generate several tokens a step (`speculative_config`)."""
