"""The QNN C API over ctypes: layouts, calls, and what is made of them. For child processes only."""
