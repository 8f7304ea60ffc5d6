"""Models of any stage on the host: prefill, decode, and comparisons. Not a runtime."""
