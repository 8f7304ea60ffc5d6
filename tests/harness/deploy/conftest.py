"""What the tests of deployment share."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.deploy.deploy import remove_run
from harness.devices.adb import AdbDevice


@pytest.fixture
def run_id(virtual_device: AdbDevice) -> Iterator[str]:
    """A new run on the shared device, removed afterwards."""
    name = f"run-{secrets.token_hex(6)}"
    yield name
    remove_run(virtual_device, name)


@pytest.fixture
def random_file(tmp_path: Path) -> Callable[[int], Path]:
    """Makes files whose contents no device can hold already."""

    def make(size: int) -> Path:
        path = tmp_path / secrets.token_hex(6)
        path.write_bytes(os.urandom(size))
        return path

    return make
