"""What `~/.ssh/config` says of a host."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices.ssh.config import resolve_host
from harness.errors import HostConfigError, HostError

_CONFIG = """\
Host board
  HostName board.lab.example
  Port 2222
  User root
  IdentityFile /keys/board
  IdentitiesOnly yes
  UserKnownHostsFile /keys/known /keys/more
  GlobalKnownHostsFile none
  ConnectTimeout 3
  ServerAliveInterval 5
  SetEnv ANDROID_ADB_SERVER_PORT=5038

Host behind
  ProxyJump me@board

Host alias
  HostKeyAlias the-board

Host circle
  ProxyJump circle

Host two
  ProxyJump a,b

Host command
  ProxyCommand nc %h %p

Host late
  ConnectTimeout soon
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config"
    path.write_text(_CONFIG)
    return path


def test_everything_that_is_said(config: Path) -> None:
    host = resolve_host("board", config)
    assert (host.asked, host.hostname, host.port, host.user) == (
        "board", "board.lab.example", 2222, "root",
    )  # fmt: skip
    assert host.known_as == "[board.lab.example]:2222"
    assert host.key_files == (Path("/keys/board"),)
    assert host.only_these_keys
    assert host.known_hosts == (Path("/keys/known"), Path("/keys/more"))
    assert (host.connect_timeout_s, host.keepalive_s, host.adb_port) == (3, 5, 5038)
    assert host.jump is None


def test_what_is_asked_for_is_stronger(config: Path) -> None:
    host = resolve_host("you@board:22", config)
    assert (host.user, host.port, host.known_as) == ("you", 22, "board.lab.example")
    assert resolve_host("[fe80::1%eth0]:2022", config).hostname == "fe80::1%eth0"


def test_a_host_that_is_not_in_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setenv("HOME", "/home/somebody")
    for file in (config, config.with_name("absent")):
        host = resolve_host("192.0.2.7", file)
        assert (host.hostname, host.port, host.user) == ("192.0.2.7", 22, "somebody")
        assert Path("/home/somebody/.ssh/id_ed25519") in host.key_files
        assert host.known_hosts[0] == Path("/home/somebody/.ssh/known_hosts")
        assert host.adb_port is None


def test_another_host_in_between(config: Path) -> None:
    jump = resolve_host("behind", config).jump
    assert jump is not None
    assert (jump.hostname, jump.user, jump.port) == ("board.lab.example", "me", 2222)


def test_a_name_for_its_key(config: Path) -> None:
    assert resolve_host("alias", config).known_as == "the-board"


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("circle", "in a circle"),
        ("two", "several hosts"),
        ("command", "ProxyCommand is not supported"),
        ("late", "'soon' is no number"),
        ("a@b@c", "a host is HOST"),
    ],
)
def test_what_cannot_be_used(config: Path, host: str, reason: str) -> None:
    with pytest.raises(HostConfigError, match=reason) as caught:
        resolve_host(host, config)
    assert caught.value.exit_code == 2


@given(asked=st.text(max_size=30), text=st.text(max_size=100))
def test_anything_is_a_host_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, asked: str, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-config"
    path.write_bytes(text.encode("utf-8", "replace"))
    said = "fine"
    try:
        assert resolve_host(asked, path).asked == asked
    except HostError as error:
        said = str(error)
    assert said.isprintable()
