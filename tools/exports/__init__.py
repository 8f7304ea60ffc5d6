"""Exports of small language models, made with the exporters that people use."""
