"""A prefill/decode loop on the host, to check numerics stage by stage. It is no runtime."""
