"""Keys of adb itself, and files that are not keys."""

import base64
import os
import subprocess
from pathlib import Path

import adbutils
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
)
from hypothesis import given
from hypothesis import strategies as st

from plugins.virtual_android.auth import (
    is_signed,
    load_keys,
    parse_private_key,
    parse_public_key,
    user_key_files,
)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "adbkey"
    subprocess.run([adbutils.adb_path(), "keygen", path], check=True, capture_output=True)
    return path


def _sign(key_file: Path, token: bytes) -> bytes:
    key = load_pem_private_key(key_file.read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    return key.sign(token, padding.PKCS1v15(), Prehashed(hashes.SHA1()))  # noqa: S303


def test_private_and_public_key_files_agree(key_file: Path) -> None:
    public = key_file.with_name("adbkey.pub").read_bytes()
    assert parse_public_key(public) == parse_private_key(key_file.read_bytes())


def test_a_signature_holds_for_its_token_alone(key_file: Path) -> None:
    key = parse_private_key(key_file.read_bytes())
    token = os.urandom(20)
    signature = _sign(key_file, token)
    assert is_signed(key, token, signature)
    assert not is_signed(key, os.urandom(20), signature)
    assert not is_signed(key, token, signature[:-1])
    assert not is_signed(key, token, bytes(256))
    assert not is_signed(key, token, b"\xff" * 256)
    assert not is_signed(key, b"", signature)


@given(st.binary(max_size=900))
def test_garbage_is_a_key_error(data: bytes) -> None:
    for text in (data, base64.b64encode(data)):
        with pytest.raises(ValueError, match=r"^not a"):
            parse_public_key(text)
        with pytest.raises(ValueError, match=r"^not a"):
            parse_private_key(b"-----BEGIN PRIVATE KEY-----\n" + text + b"\n-----END-----\n")


def test_key_files_of_the_user(key_file: Path, tmp_path: Path) -> None:
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    (vendor / "lab.adb_key").write_bytes(key_file.read_bytes())
    environment = {
        "ADB_VENDOR_KEYS": f"{vendor}:{tmp_path}/single",
        "ANDROID_USER_HOME": str(tmp_path / "user"),
    }
    files = user_key_files(environment, tmp_path / "home")
    assert files == [
        vendor / "lab.adb_key",
        tmp_path / "single",
        tmp_path / "user" / "adbkey",
        tmp_path / "home" / ".android" / "adbkey",
    ]
    assert len(load_keys(files)[0]) == 1


def test_a_world_writable_file_is_left_out(key_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "adbkey"
    copy.write_bytes(key_file.read_bytes())
    copy.chmod(0o666)
    keys, refused = load_keys([copy])
    assert keys == []
    assert refused == [f"{copy}: writable by everybody"]
