"""Plugins and fixtures of all tests."""

import pytest

pytest_plugins = ["harness.pytest_plugin", "pytester"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; all else keeps its order."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
