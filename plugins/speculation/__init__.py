"""Dialogs that generate several tokens a step: building, checking and training for them."""
