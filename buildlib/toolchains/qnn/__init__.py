"""The QNN C API over ctypes, for child processes only."""
