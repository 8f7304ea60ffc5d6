"""Imported by the process that commands are forked from: it builds the command line once.

A process of its own takes 50 ms for that, most of what a short command takes.
"""

import contextlib
import functools
import gc
from importlib import import_module

from tests.command_line import IMPORTED

gc.disable()  # all that is imported stays
for name in IMPORTED:
    import_module(name)
with contextlib.suppress(ModuleNotFoundError):
    import_module("plugins.virtual_android.manager")

from harness.cli import app  # noqa: E402

app.command_line = functools.cache(app.command_line)
app.command_line()
for panel in app.panels().values():
    for name in panel:
        app.load_command(name)
gc.enable()
gc.freeze()  # the collector of each command would copy what it only looks at
