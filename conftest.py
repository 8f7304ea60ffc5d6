"""Plugins and fixtures of all tests."""

import pytest

pytest_plugins = ["harness.pytest_plugin", "pytester"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that take long, or the last worker would be left alone with one."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
