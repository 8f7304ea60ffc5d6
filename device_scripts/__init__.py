"""Scripts that run on a device: POSIX shell and stdlib-only Python 3.8+, read as files."""
