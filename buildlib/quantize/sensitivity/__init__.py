"""Costs of quantization, tensor by tensor."""
