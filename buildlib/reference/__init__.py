"""Prefill/decode loop on the host, to check numerics stage by stage. Not a runtime."""
