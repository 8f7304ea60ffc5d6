"""Whether a host is the one that it says: its key against known_hosts files, strictly."""

from collections.abc import Iterable
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

from harness.errors import HostConfigError, HostKeyChangedError, HostKeyError
from harness.ssh.config import HostConfig

_RSA = ("rsa-sha2-512", "rsa-sha2-256")


def known_keys(host: HostConfig) -> list[paramiko.PKey]:
    """The keys that the host may show.

    Raises:
        HostConfigError: a file of keys cannot be read.
    """
    keys: list[paramiko.PKey] = []
    revoked: list[paramiko.PKey] = []
    for file in host.known_hosts:
        trusted, refused = _read(host, file)
        keys += _of(trusted, host.known_as)
        revoked += _of(refused, host.known_as)
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


def _of(keys: HostKeys, name: str) -> list[paramiko.PKey]:
    entries = keys.lookup(name)
    return [] if entries is None else [entries[kind] for kind in entries.keys()]  # noqa: SIM118


def _read(host: HostConfig, file: Path) -> tuple[HostKeys, HostKeys]:
    """Its keys, and those that it revokes; lines that are neither are left out, as `ssh` does."""
    keys, revoked = HostKeys(), HostKeys()
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return keys, revoked
    except OSError as error:
        raise HostConfigError(host.asked, f"{file} cannot be used: {error}") from None
    for line in lines:
        marker, _, rest = line.strip().partition(" ")
        if not marker or marker.startswith("#"):
            continue
        if not marker.startswith("@"):
            _add(keys, line.strip())
        elif marker == "@revoked":
            _add(revoked, rest.strip())
    return keys, revoked


def _add(keys: HostKeys, line: str) -> None:
    try:
        entry = HostKeyEntry.from_line(line)
    except (InvalidHostKey, paramiko.SSHException, ValueError):
        return
    if entry is None or entry.key is None:
        return
    for name in entry.hostnames:
        keys.add(name, entry.key.get_name(), entry.key)
