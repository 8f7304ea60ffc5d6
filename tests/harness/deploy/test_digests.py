"""The builder's hashes, with the harness's error."""

import shutil
from pathlib import Path

import pytest

from harness.clock import Deadline
from harness.deploy.digests import hash_files, hashes_on
from harness.deploy.scripts import ensure_scripts, installed_scripts
from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.errors import DeviceUnsupportedError, HostFileError
from tests.system import program

_TOOLS = (
    *("bash", "cat", "chmod", "find", "id", "kill", "ls", "mkdir", "mv", "ps", "rm", "rmdir"),
    *("sed", "sh", "stat", "touch"),
)


def test_what_cannot_be_hashed(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "absent"):
        with pytest.raises(HostFileError) as caught:
            hash_files([bad], tmp_path / "memo")
        assert caught.value.path == str(bad)


@pytest.fixture
def few_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine has few tools, none of which hashes; gives their folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in _TOOLS:
        if path := shutil.which(name):
            (folder / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return folder


def test_a_device_without_sha256sum_takes_our_scripts_all_the_same(
    request: pytest.FixtureRequest,
) -> None:
    toybox = program("toybox")
    few_tools: Path = request.getfixturevalue("few_tools")
    (few_tools / "toybox").symlink_to(toybox)
    device = Device(LocalTransport())
    folder = ensure_scripts(device, Deadline(200))
    hashes = hashes_on(device, folder, [*installed_scripts().hashes, "absent"], timeout_s=200)
    assert hashes == installed_scripts().hashes


def test_a_device_that_cannot_hash_is_told_so(few_tools: Path) -> None:
    with pytest.raises(DeviceUnsupportedError, match="no sha256sum or toybox"):
        ensure_scripts(Device(LocalTransport()), Deadline(200))
