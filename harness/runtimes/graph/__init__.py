"""Containers by their graphs, without Genie: prefill and greedy decoding over the QNN C API."""
