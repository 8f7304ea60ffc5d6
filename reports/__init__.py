"""Results in, HTML and verdicts out: no device here."""
