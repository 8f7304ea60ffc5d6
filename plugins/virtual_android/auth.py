"""Authentication of adb servers: holders of the user's own adb keys only.

A host proves itself by signing a 20-byte token with RSA, PKCS#1 v1.5, the token standing where a
SHA-1 digest would (AOSP: `protocol.txt`, AUTH). Public keys come from the user's private key
files, because the adb server needs no `.pub` beside them, or from a `.pub` in Android's format
(AOSP libcrypto_utils `android_pubkey`): base64 of {words, n0inv, modulus[256], rr[256], exponent},
little-endian. A key that a stranger offers is never accepted: there is no screen to confirm it on.
"""

import base64
import binascii
import struct
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import (
    RSAPrivateKey,
    RSAPublicKey,
    RSAPublicNumbers,
)
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA1
from cryptography.hazmat.primitives.serialization import load_pem_private_key

TOKEN_SIZE = 20

_KEY_BYTES = 256
_ANDROID_KEY = struct.Struct(f"<II{_KEY_BYTES}s{_KEY_BYTES}sI")
_MAX_KEY_FILE = 16 * 1024
_OTHERS_WRITE = 0o002


def is_signed(key: RSAPublicKey, token: bytes, signature: bytes) -> bool:
    """Check that `signature` is the key's over `token`, as adb signs."""
    try:
        key.verify(signature, token, PKCS1v15(), Prehashed(SHA1()))  # noqa: S303 - adb's choice
    except (InvalidSignature, ValueError):
        return False
    return True


def parse_public_key(text: bytes) -> RSAPublicKey:
    """Read an `adbkey.pub`, or the payload of an AUTH RSAPUBLICKEY message; raises `ValueError`."""
    words = text.strip(b"\0 \r\n\t").split(None, 1)
    try:
        blob = base64.b64decode(words[0], validate=True) if words else b""
        _, _, modulus, _, exponent = _ANDROID_KEY.unpack(blob)
        key = RSAPublicNumbers(exponent, int.from_bytes(modulus, "little")).public_key()
    except (binascii.Error, struct.error, ValueError):
        raise ValueError("not a public key in Android's format") from None
    return _checked(key)


def parse_private_key(pem: bytes) -> RSAPublicKey:
    """Return the public half of a key as `adb keygen` writes it (PKCS#8); raises `ValueError`."""
    try:
        # Validation takes 0.1 s, and only the public half is used.
        key = load_pem_private_key(pem, None, unsafe_skip_rsa_key_validation=True)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("not an unencrypted private key in PEM form") from None
    return _checked(key.public_key() if isinstance(key, RSAPrivateKey) else None)


def _checked(key: RSAPublicKey | None) -> RSAPublicKey:
    if key is None or key.key_size != _KEY_BYTES * 8:
        raise ValueError("not an RSA key of 2048 bits")
    return key


def user_key_files(environment: Mapping[str, str], home: Path) -> list[Path]:
    """Return the private key files that an adb server of this user signs with; they need not exist.

    `$ADB_VENDOR_KEYS` names files, or folders of `*.adb_key` files; the user's own key lies in
    `~/.android`, or in `$ANDROID_USER_HOME` if that is set.
    """
    files: list[Path] = []
    for entry in filter(None, environment.get("ADB_VENDOR_KEYS", "").split(":")):
        path = Path(entry)
        files += sorted(path.glob("*.adb_key")) if path.is_dir() else [path]
    if own := environment.get("ANDROID_USER_HOME"):
        files.append(Path(own) / "adbkey")
    files.append(home / ".android" / "adbkey")
    return files


def load_keys(files: list[Path]) -> tuple[list[RSAPublicKey], list[str]]:
    """Return the readable keys among `files`, and one line for each file that was left out.

    A file that users other than its owner and group may write is left out: anybody could have
    put a key there.
    """
    keys: list[RSAPublicKey] = []
    remarks: list[str] = []
    for file in files:
        public = file.with_name(file.name + ".pub")
        for path, parse in ((file, parse_private_key), (public, parse_public_key)):
            try:
                if path.stat().st_mode & _OTHERS_WRITE:
                    raise ValueError("writable by everybody")
                with path.open("rb") as stream:
                    keys.append(parse(stream.read(_MAX_KEY_FILE)))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                remarks.append(f"{path}: {error}")
            else:
                break
    return keys, remarks
