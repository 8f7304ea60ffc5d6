"""Telemetry of a device at work, and its preparation for a measurement."""
