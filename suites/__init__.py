"""What users run: suites, plans, recipes and the reference model."""
