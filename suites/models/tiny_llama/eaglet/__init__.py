"""Eaglet for the reference model: a draft head on its hidden states."""
