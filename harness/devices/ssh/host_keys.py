"""Whether a host is the one that it says: its key against known_hosts files, strictly."""

import base64
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

import paramiko

from harness.devices.ssh.config import HostConfig
from harness.errors import HostConfigError, HostKeyChangedError, HostKeyError

_RSA = ("rsa-sha2-512", "rsa-sha2-256")


def known_keys(host: HostConfig) -> list[paramiko.PKey]:
    """The keys that the host may show.

    Raises:
        HostConfigError: a file of keys cannot be read.
    """
    keys: list[paramiko.PKey] = []
    revoked: list[paramiko.PKey] = []
    for line in (line for file in host.known_hosts for line in _read(host, file)):
        words = line.split()
        marker = words.pop(0) if line.startswith("@") else ""
        # Lines that are neither are left out, as `ssh` does; certificates are not supported.
        if marker in {"", "@revoked"} and len(words) > 2 and _names(words[0], host.known_as):
            key = _key(*words[1:3])
            if key is not None:
                (revoked if marker else keys).append(key)
    return [key for key in keys if key not in revoked]


def algorithms(keys: Iterable[paramiko.PKey], supported: Iterable[str]) -> list[str]:
    """What to agree on with the host: kinds of which a key is known come first."""
    names = [key.get_name() for key in keys]
    wanted = [kind for name in names for kind in (_RSA if name == "ssh-rsa" else (name,))]
    supported = list(supported)
    first = [kind for kind in dict.fromkeys(wanted) if kind in supported]
    return first + [kind for kind in supported if kind not in first]


def check_host_key(host: HostConfig, known: Iterable[paramiko.PKey], shown: paramiko.PKey) -> None:
    """Refuse a host whose key is not among the known ones.

    Raises:
        HostKeyError: none is known.
        HostKeyChangedError: others are.
    """
    known = list(known)
    if shown in known:
        return
    kind = HostKeyChangedError if known else HostKeyError
    files = tuple(str(file) for file in host.known_hosts)
    raise kind(host.asked, host.known_as, shown.get_name(), shown.fingerprint, files)


def _read(host: HostConfig, file: Path) -> list[str]:
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostConfigError(host.asked, f"{file} cannot be used: {error}") from None
    return [line.strip() for line in lines if not line.strip().startswith("#")]


def _names(patterns: str, name: str) -> bool:
    """Whether one of several names, hashed or with `*` and `?`, is meant, and none with a `!`."""
    name = name.lower()
    found = False
    for pattern in patterns.lower().split(",") if "|" not in patterns else [patterns]:
        if pattern.startswith("!") and _matches(pattern[1:], name):
            return False
        found |= _is_hash_of(pattern, name) or _matches(pattern, name)
    return found


def _matches(pattern: str, name: str) -> bool:
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name))


def _is_hash_of(pattern: str, name: str) -> bool:
    """Whether `|1|SALT|HASH` is that of a name."""
    parts = pattern.split("|")
    if len(parts) != 4 or parts[:2] != ["", "1"]:
        return False
    try:
        salt, hashed = (base64.b64decode(part, validate=True) for part in parts[2:])
    except ValueError:
        return False
    return hmac.digest(salt, name.encode(), "sha1") == hashed


def _key(kind: str, text: str) -> paramiko.PKey | None:
    try:
        return paramiko.PKey.from_type_string(kind, base64.b64decode(text, validate=True))
    except Exception:  # noqa: BLE001 - what paramiko makes of a broken key has no common name
        return None
