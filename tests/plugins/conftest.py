"""The command line, for plugins' commands."""

from tests.harness.cli.conftest import library, process, qnnfarm

__all__ = ["library", "process", "qnnfarm"]
