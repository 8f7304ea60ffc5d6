"""What every test of the project runs under."""

import os

import pytest
from hypothesis import settings

pytest_plugins = ["harness.plugin", "pytester"]

# On CI the same examples each time, so that a red run can be repeated; elsewhere new ones.
settings.register_profile("ci", derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; all else keeps its order."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
