"""The builder's hashes, with the harness's error."""

import hashlib
from pathlib import Path

import pytest

from harness.deploy.digests import hash_files
from harness.errors import HostFileError


def test_files_are_hashed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    digest = hash_files([file], tmp_path / "memo")[file]
    assert (digest.sha256, digest.size) == (hashlib.sha256(b"one").hexdigest(), 3)


def test_what_cannot_be_hashed(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "absent"):
        with pytest.raises(HostFileError) as caught:
            hash_files([bad], tmp_path / "memo")
        assert caught.value.path == str(bad)
