"""Workloads that run on a leased device: bench, perplexity, generate, dialog, command."""
