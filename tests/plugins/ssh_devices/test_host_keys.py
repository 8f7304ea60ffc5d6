"""Judgements on host keys, by known_hosts lines and by files of revoked keys."""

import base64
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HostError
from plugins.ssh_devices.config import SshHostConfig
from plugins.ssh_devices.host_keys import KnownKeys, check_host_key, known_keys
from tests.plugins.ssh_devices.ssh_server import make_key

_NAME = "[127.0.0.1]:2222"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The key that the host shows, and another."""
    folder = tmp_path_factory.mktemp("keys")
    return make_key(folder / "own"), make_key(folder / "other")


def _public(path: Path) -> str:
    return path.with_suffix(".pub").read_text().strip()


@pytest.fixture
def config(tmp_path: Path) -> SshHostConfig:
    return SshHostConfig(
        asked="board", hostname="127.0.0.1", port=2222, user="me", known_as=_NAME, key_files=(),
        only_these_keys=True, known_hosts=(tmp_path / "known",), revoked_keys=(), jump=None,
        proxy_command="", connect_timeout_s=10, keepalive_s=15, adb_port=None,
    )  # fmt: skip


def _refusal(host: SshHostConfig, key: Path) -> str:
    """Return why the host is refused when it shows a key; empty if it is accepted."""
    try:
        check_host_key(host, known_keys(host), paramiko.PKey.from_path(key))
    except HostError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("NAME OWN", ""),
        ("", "KNOWN has none for NAME: check the fingerprint"),
        ("NAME OTHER", "is NOT the one that KNOWN has for NAME"),
        # A host that gets a new key, or a name that several hosts share
        ("NAME OWN\nNAME OTHER", ""),
        ("NAME OTHER\nNAME OWN", ""),
        ("NAME OWN\n@revoked * OTHER", ""),
        ("@revoked\tNAME  OWN", "revoked (KNOWN:1): do not accept it"),
        ("@revoked * OWN", "revoked (KNOWN:1): do not accept it"),
        ("# remark\nNAME OWN\n@revoked NAME OWN", "revoked (KNOWN:3): do not accept it"),
        ("@cert-authority * OTHER", "KNOWN:1 trusts NAME by @cert-authority"),
        ("# x\n\nshort line\nh ssh-ed25519 A\n@cert-authority * ssh-rsa AAAA\nNAME OWN", ""),
        ("*   OWN", ""),
        ("[127.0.0.?]:* OWN", ""),
        ("nobody,[127.* OWN", ""),
        ("[127.0.0.1]:? OWN", "has none"),
        ("*,![127.0.0.1]:* OWN", "has none"),
        ("[127x0.0.1]:* OWN", "has none"),
        ("|1|AAAA|! OWN", "has none"),
    ],
)
def test_a_shown_key_is_judged_by_lines(
    config: SshHostConfig, keys: tuple[Path, Path], lines: str, reason: str
) -> None:
    own, other = keys

    known = config.known_hosts[0]
    words = {"NAME": _NAME, "OWN": _public(own), "OTHER": _public(other), "KNOWN": str(known)}

    def filled(text: str) -> str:
        return re.sub("|".join(words), lambda found: words[found[0]], text)

    known.write_text(filled(lines))
    refusal = _refusal(config, own)
    assert filled(reason) in refusal
    assert bool(refusal) is bool(reason)
    assert refusal.isprintable()
    if "revoked" in reason:
        assert "ssh" not in refusal.partition(")")[2]  # no command that would accept it


def test_known_hosts_that_cannot_be_read_are_named(
    config: SshHostConfig, keys: tuple[Path, Path]
) -> None:
    config.known_hosts[0].mkdir()
    assert f"{config.known_hosts[0]} cannot be used" in _refusal(config, keys[0])


def test_names_match_in_capitals_and_hashed(config: SshHostConfig, keys: tuple[Path, Path]) -> None:
    own, _ = keys
    config.known_hosts[0].write_text(f"board.EXAMPLE {_public(own)}")
    host = replace(config, known_as="Board.Example")
    assert _refusal(host, own) == ""
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", config.known_hosts[0]], check=True)
    assert "board" not in config.known_hosts[0].read_text()
    assert _refusal(host, own) == ""


def _write_list(file: Path, key: Path) -> None:
    file.write_text(f"# remark\n{_public(key)}")


def _write_krl(file: Path, key: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", file, f"{key}.pub"], check=True)


@pytest.mark.parametrize("write", [_write_list, _write_krl])
def test_a_list_of_revoked_keys(
    config: SshHostConfig, keys: tuple[Path, Path], write: Callable[[Path, Path], None]
) -> None:
    own, other = keys
    config.known_hosts[0].write_text(f"{_NAME} {_public(own)}")
    revoked = config.known_hosts[0].with_name("revoked")
    host = replace(config, revoked_keys=(revoked,))
    write(revoked, other)
    assert _refusal(host, own) == ""
    write(revoked, own)
    assert f"revoked ({revoked})" in _refusal(host, own)
    revoked.write_bytes(b"SSHKRL\n")
    assert "its RevokedHostKeys" in _refusal(host, own)
    revoked.unlink()
    assert "its RevokedHostKeys" in _refusal(host, own)


@settings(max_examples=30)
@given(
    st.one_of(
        st.text(max_size=60),
        st.builds(
            lambda kind, blob: f"* {kind} {base64.b64encode(blob).decode()}",
            st.sampled_from(["ssh-rsa", "ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-dss"]),
            st.binary(max_size=60),
        ),
    )
)
def test_any_line_is_survived(config: SshHostConfig, line: str) -> None:
    config.known_hosts[0].write_text(line, "utf-8")
    assert known_keys(config) == KnownKeys()
