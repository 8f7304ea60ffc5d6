"""Names by which the parts of the plugin know a test that uses devices."""

import pytest

LEASE_FIXTURE = "_qnnfarm_lease"
"""Among a test's fixtures if and only if it uses a device of this plugin."""
PATH_FIXTURE, SESSION_FIXTURE = "_qnnfarm_path", "_qnnfarm_session"
SESSION_ID = "session"
"""Begins the id of a session in a test's name, before its number from 1."""
ROWS = pytest.StashKey[list[dict[str, object]]]()
"""A test's rows of the table of measurements."""


def uses_device(item: pytest.Item) -> bool:
    """Return whether a test leases devices, through any fixture."""
    return LEASE_FIXTURE in getattr(item, "fixturenames", ())
