"""Self-speculative decoding for the reference model: forecast tokens and their prefix."""
