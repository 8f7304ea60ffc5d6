"""The error of steps that cannot be done, for child processes and devices.

Standard library only, Python 3.8+: this file goes to devices with the graph runtime.
"""


class RefusedError(Exception):
    """A step is impossible for a reason that is one line and needs no stack trace."""
