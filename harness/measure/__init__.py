"""What samples say: warm-up, stability, comparison. No device, no database."""
