"""Imported by the process that commands are forked from: it builds the command line once.

A process of its own takes 50 ms for that, most of what a short command takes.
"""

import functools
import gc

from harness.cli import app

app.command_line = functools.cache(app.command_line)
app.command_line()
gc.freeze()  # the collector of each command would copy what it only looks at
