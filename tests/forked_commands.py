"""Imported by the process that commands are forked from: it builds the command line once.

A process of its own takes 50 ms for that, most of what a short command takes.
"""

import functools

from harness.cli import app

app.command_line = functools.cache(app.command_line)
app.command_line()
