"""What `~/.ssh/config` says of a host."""

import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HostError
from plugins.ssh_devices.config import resolve_host
from tests.system import program

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
  ProxyJump around

Host around
  ProxyJump circle

Host itself
  ProxyJump itself

Host chain
  ProxyJump you@first,second:2200

Host first
  ProxyJump behind

Host second
  ProxyJump nobody
  ProxyCommand nobody

Host command
  ProxyCommand nc -X %% %h %p %r "%n"

Host fdpass
  ProxyCommand nc %h
  ProxyUseFdpass yes

Host token
  ProxyCommand nc %z
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    program("ssh")
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


def test_explicit_settings_override_the_ssh_config(config: Path) -> None:
    host = resolve_host("you@board:22", config)
    assert (host.user, host.port, host.known_as) == ("you", 22, "board.lab.example")
    assert resolve_host("[fe80::1%eth0]:2022", config).hostname == "fe80::1%eth0"


def test_a_host_that_is_not_in_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setenv("HOME", "/home/somebody")
    for file in (config, config.with_name("absent"), None):
        host = resolve_host("192.0.2.7", file)
        assert (host.hostname, host.port, host.user) == ("192.0.2.7", 22, me.pw_name)
        assert Path("/home/somebody/.ssh/id_ed25519") in host.key_files
        assert host.known_hosts[0] == Path(me.pw_dir, ".ssh/known_hosts")
        assert host.adb_port is None


def test_a_folder_of_configurations_is_included(config: Path) -> None:
    """As companies ship them; `Include` may stand for one host alone."""
    folder = config.parent / "conf.d"
    folder.mkdir()
    (folder / "one.conf").write_text("Host one\n  HostName one.example\n")
    (folder / "two.conf").write_text("Host *\n  User lab\n")
    text = f"Include {folder}/one.*\nHost two\n  Include {folder}/two.conf\nHost *\n  Port 2022\n"
    config.write_text(text)
    one, two = resolve_host("one", config), resolve_host("two", config)
    assert (one.hostname, one.port) == ("one.example", 2022)
    assert (two.user, two.port) == ("lab", 2022)
    assert one.user != "lab"


def test_files_with_tokens_variables_and_spaces(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setenv("WHERE", "/lab")
    config.write_text(
        """
        Host farm
          HostName %h.example
          User ann
          Port 2022
          HostKeyAlias the-farm
          UserKnownHostsFile %d/known-%n-%h-%p-%r-%u-%i-%% "${WHERE}/my hosts" ~/%k
          RevokedHostKeys ${WHERE}/revoked-%n
          IdentityFile ${WHERE}/%r@%h
          IdentityFile %d/key
          IdentityFile none
        """
    )
    host = resolve_host("farm", config)
    home = me.pw_dir
    assert host.known_hosts[:3] == (
        Path(f"{home}/known-farm-farm.example-2022-ann-{me.pw_name}-{me.pw_uid}-%"),
        Path("/lab/my hosts"),
        Path(f"{home}/the-farm"),
    )
    assert host.key_files == (Path("/lab/ann@farm.example"), Path(f"{home}/key"))
    assert host.revoked_keys == (Path("/lab/revoked-farm"),)


def test_a_chain_of_hosts_in_between(config: Path) -> None:
    """The first is reached as it says itself, the others through the one before."""
    hosts = [resolve_host("chain", config)]
    while jump := hosts[-1].jump:
        hosts.append(jump)
    assert [(host.hostname, host.port) for host in hosts] == [
        ("chain", 22), ("second", 2200), ("first", 22), ("behind", 22), ("board.lab.example", 2222),
    ]  # fmt: skip
    assert (hosts[2].user, hosts[4].user) == ("you", "me")
    assert [host.proxy_command for host in hosts] == [""] * 5


def test_a_command_in_between(config: Path) -> None:
    host = resolve_host("ann@command:2022", config)
    assert host.proxy_command == 'nc -X % command 2022 ann "command"'


def test_a_name_for_its_key(config: Path) -> None:
    assert resolve_host("alias", config).known_as == "the-board"


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("circle", "in a circle"),
        ("itself", "jumphost loop via itself"),
        ("fdpass", "ProxyUseFdpass is not supported"),
        ("token", "its ProxyCommand has the token '%z', which is unknown"),
        ("a@b@c", "a host is HOST"),
        ("-oProxyCommand=id", "a host is HOST"),
        ("-l@board", "a host is HOST"),
        ("board;id", "a host is HOST"),
        ("$(id)@board", "a host is HOST"),
        ("board\0", "null byte"),
    ],
)
def test_what_cannot_be_used(config: Path, host: str, reason: str) -> None:
    with pytest.raises(HostError, match=reason) as caught:
        resolve_host(host, config)
    assert caught.value.exit_code == 2


def test_a_configuration_that_ssh_refuses_is_refused_in_its_words(config: Path) -> None:
    config.write_text("Host late\n  ConnectTimeout soon\n")
    with pytest.raises(HostError, match=r"line 2: invalid time value") as caught:
        resolve_host("board", config)
    assert str(config) in str(caught.value)


def test_without_the_ssh_program_the_error_says_so(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(config.parent))
    with pytest.raises(HostError, match="install OpenSSH's client"):
        resolve_host("board", config)


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
