"""What runs on a device: POSIX shell and standard-library Python 3.8+, read as files by the harness."""
