"""What runs on a device, read as files by the harness: POSIX shell and stdlib-only Python 3.8+."""
