"""Suites, plans, recipes and the reference model, for users to run."""
