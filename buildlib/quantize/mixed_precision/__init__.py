"""Costs of quantization, tensor by tensor, and mixed precision that is within a bound."""
