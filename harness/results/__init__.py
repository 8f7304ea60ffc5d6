"""Measurements: records, storage, statistics and comparison. A leaf of the harness."""
