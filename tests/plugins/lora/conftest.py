"""The reference model, and Genie with the tiny one."""

from tests.buildlib.conftest import trained
from tests.buildlib.dialogs.conftest import genie_lab

__all__ = ["genie_lab", "trained"]
