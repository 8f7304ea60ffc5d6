"""The model and the binaries of the other toolchain's tests."""

from tests.buildlib.toolchains.conftest import binary_for, dlcs, models, toolchain

__all__ = ["binary_for", "dlcs", "models", "toolchain"]
