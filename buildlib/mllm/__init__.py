"""Models for mllm's ahead-of-time flow on QNN: its configurations, tensors and parameter files."""
