"""ExecuTorch on devices: its runner for the QNN backend, its programs, and what it prints."""
