"""Strict check of host keys against known_hosts files."""

import base64
import hmac
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import paramiko

from harness.errors import HostError, one_line
from plugins.ssh_devices.config import SshHostConfig

_KRL = b"SSHKRL\n"
_ASK_TIMEOUT_S = 30.0
_RSA = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """Keys of a host in known_hosts files.

    Attributes:
        trusted: keys that the host may show; some of them may be revoked, too.
        revoked: keys that it must not show, each with the file and line that says so.
        authorities: files and lines that trust the host by certificates, which are not checked.
    """

    trusted: tuple[paramiko.PKey, ...] = ()
    revoked: tuple[tuple[paramiko.PKey, str], ...] = ()
    authorities: tuple[str, ...] = ()


def known_keys(host: SshHostConfig) -> KnownKeys:
    """Read the keys of a host."""
    trusted: list[paramiko.PKey] = []
    revoked: list[tuple[paramiko.PKey, str]] = []
    authorities: list[str] = []
    for file in host.known_hosts:
        for number, line in enumerate(_read(host, file), 1):
            words = line.split()
            marker = words.pop(0) if line.startswith("@") else ""
            # Lines of any other kind are left out, as `ssh` does.
            if marker not in {"", "@revoked", "@cert-authority"} or len(words) < 3:
                continue
            if _names(words[0], host.known_as) and (key := _key(*words[1:3])) is not None:
                if marker == "@cert-authority":
                    authorities.append(f"{file}:{number}")
                elif marker:
                    revoked.append((key, f"{file}:{number}"))
                else:
                    trusted.append(key)
    return KnownKeys(tuple(trusted), tuple(revoked), tuple(authorities))


def algorithms(keys: Iterable[paramiko.PKey], supported: Iterable[str]) -> list[str]:
    """Return the key types to agree on with the host: those of known keys come first."""
    names = [key.get_name() for key in keys]
    kinds = [kind for name in names for kind in (_RSA if name == "ssh-rsa" else (name,))]
    supported = list(supported)
    first = [kind for kind in dict.fromkeys(kinds) if kind in supported]
    return first + [kind for kind in supported if kind not in first]


def check_host_key(host: SshHostConfig, known: KnownKeys, shown: paramiko.PKey) -> None:
    """Refuse a host with a key that is not among the trusted ones, or is revoked."""
    key = f"it shows the {shown.get_name()} key {shown.fingerprint}"
    name, files = host.known_as, ", ".join(map(str, host.known_hosts))
    places = [place for key, place in known.revoked if key == shown]
    places += [str(file) for file in host.revoked_keys if _lists(host, file, shown)]
    if places:
        raise HostError(
            host.asked,
            f"{key}, which is revoked ({', '.join(places)}): do not accept it, and ask who runs "
            "the host for its new key",
        )
    if shown in known.trusted:
        return
    if known.trusted:
        reason = (
            f"which is NOT the one that {files} has for {name}: somebody may be in between; if the "
            f"host was set up anew, `ssh-keygen -R {shlex.quote(one_line(name))}` forgets its old "
            "key"
        )
    elif known.authorities:
        reason = (
            f"and {', '.join(known.authorities)} trusts {name} by @cert-authority, whose "
            "certificates qnnfarm does not check: add the key itself with `ssh-keyscan`, after "
            "`ssh` has connected to the host"
        )
    else:
        reason = (
            f"and {files} has none for {name}: check the fingerprint, then accept it with `ssh` "
            "once"
        )
    raise HostError(host.asked, f"{key}, {reason}")


def _lists(host: SshHostConfig, file: Path, key: paramiko.PKey) -> bool:
    """Return whether a file of revoked keys, a list or OpenSSH's KRL, has a key."""
    try:
        content = file.read_bytes()
        if not content.startswith(_KRL):
            lines = (line.split() for line in content.decode("utf-8", "replace").splitlines())
            return any(_key(*words[:2]) == key for words in lines if len(words) > 1)
        result = subprocess.run(
            ["ssh-keygen", "-Q", "-f", str(file), "/dev/stdin"],  # noqa: S607 - the user's
            input=f"{key.get_name()} {key.get_base64()}\n".encode(),
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(host.asked, f"its RevokedHostKeys cannot be used: {error}") from None
    if result.returncode not in {0, 1}:
        reason = f"its RevokedHostKeys {file} cannot be used: {os.fsdecode(result.stderr)}"
        raise HostError(host.asked, reason)
    return result.returncode == 1


def _read(host: SshHostConfig, file: Path) -> list[str]:
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostError(host.asked, f"{file} cannot be used: {error}") from None
    return ["" if line.strip().startswith("#") else line.strip() for line in lines]


def _names(patterns: str, name: str) -> bool:
    """Return whether a name, hashed or with `*` and `?`, matches, and none with a `!` does."""
    name = name.lower()
    matches = False
    for pattern in patterns.lower().split(",") if "|" not in patterns else [patterns]:
        if pattern.startswith("!") and _matches(pattern[1:], name):
            return False
        matches |= _is_hash_of(pattern, name) or _matches(pattern, name)
    return matches


def _matches(pattern: str, name: str) -> bool:
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name))


def _is_hash_of(pattern: str, name: str) -> bool:
    """Return whether `|1|SALT|HASH` is that of a name."""
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
