"""The dialogs of the core's tests of runtimes."""

from tests.harness.runtimes.conftest import dialog_container, talker

__all__ = ["dialog_container", "talker"]
