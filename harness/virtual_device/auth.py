"""Who may talk to a device: holders of the user's own adb keys, and nobody else.

A host proves itself by signing a 20-byte token with RSA, PKCS#1 v1.5, the token standing where a
SHA-1 digest would (AOSP: `protocol.txt`, AUTH). Public keys come from the user's private key
files, because the adb server needs no `.pub` beside them, or from a `.pub` in Android's format
(AOSP libcrypto_utils `android_pubkey`): base64 of {words, n0inv, modulus[256], rr[256], exponent},
little-endian. A key that a stranger offers is never accepted: there is no screen to ask at.
"""

import base64
import binascii
import hmac
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import AdbKeyError

TOKEN_SIZE = 20

_KEY_BYTES = 256
_ANDROID_KEY = struct.Struct(f"<II{_KEY_BYTES}s{_KEY_BYTES}sI")
_EXPONENTS = (3, 65537)
_SHA1_DIGEST_INFO = bytes.fromhex("3021300906052b0e03021a05000414")
_MAX_KEY_FILE = 16 * 1024
_OTHERS_WRITE = 0o002


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An RSA-2048 public key."""

    modulus: int
    exponent: int

    def __post_init__(self) -> None:
        if self.modulus.bit_length() != _KEY_BYTES * 8 or self.exponent not in _EXPONENTS:
            raise AdbKeyError("not an RSA key of 2048 bits")

    def verifies(self, token: bytes, signature: bytes) -> bool:
        """Whether `signature` is this key's over `token`, as adb signs."""
        if len(token) != TOKEN_SIZE or len(signature) != _KEY_BYTES:
            return False
        number = int.from_bytes(signature, "big")
        if number >= self.modulus:
            return False
        opened = pow(number, self.exponent, self.modulus).to_bytes(_KEY_BYTES, "big")
        tail = b"\x00" + _SHA1_DIGEST_INFO + token
        expected = b"\x00\x01" + b"\xff" * (_KEY_BYTES - 2 - len(tail)) + tail
        return hmac.compare_digest(opened, expected)


def parse_public_key(text: bytes) -> PublicKey:
    """Read the contents of an `adbkey.pub`, or the payload of an AUTH RSAPUBLICKEY message.

    Raises:
        AdbKeyError: not an RSA-2048 key in Android's format.
    """
    words = text.strip(b"\0 \r\n\t").split(None, 1)
    try:
        blob = base64.b64decode(words[0], validate=True) if words else b""
        _, _, modulus, _, exponent = _ANDROID_KEY.unpack(blob)
    except (binascii.Error, struct.error):
        raise AdbKeyError("not a public key in Android's format") from None
    return PublicKey(int.from_bytes(modulus, "little"), exponent)


def parse_private_key(pem: bytes) -> PublicKey:
    """The public half of a private key file as `adb keygen` writes it (PEM, PKCS#8).

    Raises:
        AdbKeyError: not an unencrypted RSA-2048 key of that form.
    """
    lines = [line.strip() for line in pem.splitlines() if line.strip()]
    if len(lines) < 3 or lines[0] != b"-----BEGIN PRIVATE KEY-----":
        raise AdbKeyError("not a private key in PEM form")
    try:
        outer = DerReader(base64.b64decode(b"".join(lines[1:-1]), validate=True)).sequence()
        outer.integer()
        outer.sequence()
        key = DerReader(outer.octet_string()).sequence()
        key.integer()
        return PublicKey(key.integer(), key.integer())
    except (binascii.Error, ValueError):
        raise AdbKeyError("not an RSA private key in PKCS#8 form") from None


def user_key_files(environment: Mapping[str, str], home: Path) -> list[Path]:
    """Private key files that an adb server of this user signs with; they need not exist.

    `$ADB_VENDOR_KEYS` names files, or folders of `*.adb_key` files; the user's own key lies in
    `~/.android`, or in `$ANDROID_USER_HOME` where that is set.
    """
    files: list[Path] = []
    for entry in filter(None, environment.get("ADB_VENDOR_KEYS", "").split(":")):
        path = Path(entry)
        files += sorted(path.glob("*.adb_key")) if path.is_dir() else [path]
    if own := environment.get("ANDROID_USER_HOME"):
        files.append(Path(own) / "adbkey")
    files.append(home / ".android" / "adbkey")
    return files


def load_keys(files: list[Path]) -> tuple[list[PublicKey], list[str]]:
    """Every readable key among `files` and why others were left out, one line each.

    A file that users other than its owner and group may write is left out: anybody could have
    put a key there.
    """
    keys: list[PublicKey] = []
    refused: list[str] = []
    for file in files:
        public = file.with_name(file.name + ".pub")
        for path, parse in ((file, parse_private_key), (public, parse_public_key)):
            try:
                if path.stat().st_mode & _OTHERS_WRITE:
                    raise AdbKeyError("writable by everybody")
                with path.open("rb") as stream:
                    keys.append(parse(stream.read(_MAX_KEY_FILE)))
            except FileNotFoundError:
                continue
            except (OSError, AdbKeyError) as error:
                refused.append(f"{path}: {error}")
            else:
                break
    return keys, refused


_INTEGER, _OCTET_STRING, _SEQUENCE = 0x02, 0x04, 0x30


class DerReader:
    """Reads one value after the other from untrusted bytes; `ValueError` where they do not fit."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def integer(self) -> int:
        """The next value, a non-negative integer."""
        value = int.from_bytes(self._take(_INTEGER), "big", signed=True)
        if value < 0:
            raise ValueError("negative integer in a key")
        return value

    def octet_string(self) -> bytes:
        """The next value, a byte string."""
        return self._take(_OCTET_STRING)

    def sequence(self) -> "DerReader":
        """A reader over the next value, a sequence."""
        return DerReader(self._take(_SEQUENCE))

    def _bytes(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise ValueError("truncated value")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _take(self, tag: int) -> bytes:
        found, length = self._bytes(2)
        if found != tag:
            raise ValueError(f"tag {found:#x} where {tag:#x} belongs")
        if length & 0x80:
            length = int.from_bytes(self._bytes(length & 0x7F), "big")
        return self._bytes(length)
