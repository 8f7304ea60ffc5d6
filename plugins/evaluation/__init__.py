"""Tasks that a model is scored on."""
