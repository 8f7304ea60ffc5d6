"""Plugins, a folder each, which the core does without; `pyproject.toml` attaches them."""
