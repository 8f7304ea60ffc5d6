"""Plans: what to run, how often, and what to keep of it."""
