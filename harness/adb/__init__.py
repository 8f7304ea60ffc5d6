"""Talking to an adb server: where it is, and its host, shell and sync protocols."""
