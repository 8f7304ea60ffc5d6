"""Tasks that a model is scored on, and their scores; no device here."""
