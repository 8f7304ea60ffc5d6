"""Connections to a real OpenSSH server: its key, our keys, their loss."""

import base64
import contextlib
import io
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.adb.connection import Deadline, DeadlineExceeded, StreamClosed
from harness.errors import (
    HostAuthError,
    HostKeyChangedError,
    HostKeyError,
    HostUnreachableError,
)
from harness.ssh.command import run
from harness.ssh.config import resolve_host
from harness.ssh.connecting import connect
from harness.ssh.host import SshHost, closing_by
from harness.ssh.host_keys import known_keys
from tests.ssh_server import SshServer, make_key, running_ssh_server


def _run(
    host: SshHost, line: str, stdin: bytes = b"", timeout_s: float = 30.0
) -> tuple[int, bytes]:
    output = io.BytesIO()
    return run(host, line, stdin, output, io.BytesIO(), Deadline(timeout_s)), output.getvalue()


@pytest.fixture
def host(ssh_server: SshServer) -> Iterator[SshHost]:
    with SshHost.named("board", ssh_server.config) as host:
        yield host


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent, in the environment; gives its socket."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it listens
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    yield path
    process.kill()
    process.communicate()


def test_streams_status_and_input(host: SshHost) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    assert run(host, "cat; echo err >&2; exit 7", b"in", out, err, Deadline(30)) == 7
    assert (out.getvalue(), err.getvalue()) == (b"in", b"err\n")
    big = os.urandom(3_000_000)
    assert _run(host, "cat", big) == (0, big)


def test_a_death_by_a_signal_is_no_success(host: SshHost) -> None:
    assert _run(host, "kill -9 $$")[0] == 137


def test_the_deadline_is_over_all(host: SshHost) -> None:
    for line in ("sleep 60", "while :; do echo .; sleep 0.1; done"):
        with pytest.raises(DeadlineExceeded):
            _run(host, line, timeout_s=1)


def test_threads_share_one_connection(ssh_server: SshServer, host: SshHost) -> None:
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = _run(host, f"echo {number}")[1]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"{number}\n".encode() for number in range(6)}
    assert ssh_server.log.read_text().count("Accepted publickey") == 1


def test_a_connection_lost_in_the_middle_and_made_anew(
    ssh_server: SshServer, host: SshHost
) -> None:
    class Dropping(io.BytesIO):
        def write(self, _data: object, /) -> int:
            ssh_server.drop_connections()
            return 0

    with pytest.raises(StreamClosed):
        run(host, "echo here; sleep 60", None, Dropping(), io.BytesIO(), Deadline(60))
    assert _run(host, "echo again") == (0, b"again\n")
    assert ssh_server.log.read_text().count("Accepted publickey") == 2


@pytest.mark.parametrize("timeout_s", [0.1, 30.0], ids=["by its timer", "at the end"])
def test_closing_a_channel_whose_connection_is_lost_is_no_failure(
    host: SshHost, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    def lost(_message: object) -> None:
        raise EOFError

    channel = host.session(Deadline(30))
    monkeypatch.setattr(channel.get_transport().packetizer, "send_message", lost)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with closing_by(channel, Deadline(timeout_s)):
        time.sleep(0.3)
    assert channel.closed
    assert failed == []


def test_a_host_that_went_away(ssh_server: SshServer, host: SshHost) -> None:
    assert _run(host, "true")[0] == 0
    ssh_server.stop()
    with pytest.raises((StreamClosed, HostUnreachableError)):
        _run(host, "true")
    with pytest.raises(HostUnreachableError, match="refused"):
        _run(host, "true")


def test_a_key_that_nobody_knows(ssh_server: SshServer) -> None:
    ssh_server.known_hosts.write_text("")
    with pytest.raises(HostKeyError) as caught, SshHost.named("board", ssh_server.config) as host:
        host.connect()
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", ssh_server.folder / "host_key.pub"],
        capture_output=True, text=True, check=True,
    ).stdout.split()[1]  # fmt: skip
    assert not isinstance(caught.value, HostKeyChangedError)
    assert shown in str(caught.value)
    assert str(ssh_server.known_hosts) in str(caught.value)
    assert f"[127.0.0.1]:{ssh_server.port}" in str(caught.value)
    assert "Accepted" not in ssh_server.log.read_text()


def test_a_key_that_changed(ssh_server: SshServer) -> None:
    ssh_server.trust(make_key(ssh_server.folder / "another"))
    with (
        pytest.raises(HostKeyChangedError, match="is NOT the one"),
        SshHost.named("board", ssh_server.config) as host,
    ):
        host.connect()
    assert "Accepted" not in ssh_server.log.read_text()


def test_a_known_hosts_file_with_hashed_names_and_noise(ssh_server: SshServer) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", ssh_server.known_hosts],
        check=True, capture_output=True,
    )  # fmt: skip
    assert str(ssh_server.port) not in ssh_server.known_hosts.read_text()
    with ssh_server.known_hosts.open("a") as file:
        file.write("# remark\n\nshort line\nhost ssh-ed25519 A\n@cert-authority * ssh-rsa AAAA\n")
    with SshHost.named("board", ssh_server.config) as host:
        assert _run(host, "true")[0] == 0


def test_a_key_that_is_known_and_revoked(ssh_server: SshServer) -> None:
    text = ssh_server.known_hosts.read_text()
    ssh_server.known_hosts.write_text(f"{text}@revoked {text}")
    with pytest.raises(HostKeyError), SshHost.named("board", ssh_server.config) as host:
        host.connect()


def test_a_key_that_is_revoked_for_all_hosts(ssh_server: SshServer) -> None:
    key = ssh_server.known_hosts.read_text().split(" ", 1)[1]
    with ssh_server.known_hosts.open("a") as file:
        file.write(f"@revoked\t*  {key}")
    with pytest.raises(HostKeyError), SshHost.named("board", ssh_server.config) as host:
        host.connect()


def test_one_of_several_keys_of_a_kind(ssh_server: SshServer) -> None:
    """A host that gets a new key, or a name that several hosts share."""
    another = make_key(ssh_server.folder / "another").with_suffix(".pub").read_text()
    text = ssh_server.known_hosts.read_text()
    name = text.split()[0]
    for lines in (f"{text}{name} {another}", f"{name} {another}{text}"):
        ssh_server.known_hosts.write_text(lines)
        with SshHost.named("board", ssh_server.config) as host:
            host.connect()


@pytest.mark.parametrize(
    ("names", "known"),
    [
        ("*", True),
        ("[127.0.0.?]:*", True),
        ("nobody,[127.*", True),
        ("[127.0.0.1]:?", False),
        ("*,![127.0.0.1]:*", False),
        ("[127x0.0.1]:*", False),
        ("|1|AAAA|!", False),
    ],
)
def test_names_with_patterns(ssh_server: SshServer, names: str, known: bool) -> None:
    key = ssh_server.known_hosts.read_text().split(" ", 1)[1]
    ssh_server.known_hosts.write_text(f"{names}   {key}")
    with SshHost.named("board", ssh_server.config) as host:
        if known:
            host.connect()
        else:
            with pytest.raises(HostKeyError):
                host.connect()


def test_names_are_the_same_in_capitals(ssh_server: SshServer) -> None:
    ssh_server.configure("HostKeyAlias Board.Example", host="alias")
    key = ssh_server.known_hosts.read_text().split(" ", 1)[1]
    ssh_server.known_hosts.write_text(f"board.EXAMPLE {key}")
    with SshHost.named("alias", ssh_server.config) as host:
        host.connect()


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
def test_any_line_is_survived(tmp_path: Path, line: str) -> None:
    config, known = tmp_path / "config", tmp_path / "known"
    config.write_text(f"UserKnownHostsFile {known}\nGlobalKnownHostsFile none\n")
    known.write_text(line, "utf-8")
    assert known_keys(resolve_host("board", config)) == []


def test_no_key_of_ours_is_accepted(ssh_server: SshServer) -> None:
    ssh_server.authorized_keys.write_text("")
    with (
        pytest.raises(HostAuthError, match="none of 1 keys"),
        SshHost.named("board", ssh_server.config) as host,
    ):
        host.connect()


def test_a_key_of_the_agent(ssh_server: SshServer, agent: Path) -> None:
    subprocess.run(["ssh-add", "-q", ssh_server.key], check=True)
    ssh_server.key.unlink()  # its public half stays, and says which of the agent's to use
    with SshHost.named("board", ssh_server.config) as host:
        assert _run(host, "true")[0] == 0


def test_other_keys_of_the_agent_only_where_they_may_be(ssh_server: SshServer, agent: Path) -> None:
    subprocess.run(["ssh-add", "-q", ssh_server.key], check=True)
    ssh_server.configure("IdentityFile /nowhere/key", "IdentitiesOnly no", host="agent")
    ssh_server.configure("IdentityFile /nowhere/key", host="named")
    ssh_server.config.write_text(
        ssh_server.config.read_text().replace(f"  IdentityFile {ssh_server.key}\n", "")
    )
    with SshHost.named("agent", ssh_server.config) as host:
        assert _run(host, "true")[0] == 0
    with (
        pytest.raises(HostAuthError, match="none of 0 keys"),
        SshHost.named("named", ssh_server.config) as host,
    ):
        host.connect()


def test_a_key_that_the_agent_does_not_use_costs_the_others_nothing(
    ssh_server: SshServer, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_ASKPASS"):
        monkeypatch.delenv(name, raising=False)  # nobody can be asked to confirm
    asking = make_key(ssh_server.folder / "asking")
    subprocess.run(["ssh-add", "-q", "-c", asking], check=True, capture_output=True)
    ssh_server.configure("IdentitiesOnly no", host="any")
    with ssh_server.authorized_keys.open("a") as file:
        file.write(asking.with_suffix(".pub").read_text())
    with SshHost.named("any", ssh_server.config) as host:
        assert _run(host, "true")[0] == 0
    ssh_server.key.unlink()
    with (
        pytest.raises(HostAuthError, match="the SSH agent does not sign with its key test"),
        SshHost.named("any", ssh_server.config) as host,
    ):
        host.connect()


def test_a_key_with_a_passphrase_says_what_to_do(ssh_server: SshServer) -> None:
    ssh_server.key.unlink()
    ssh_server.key.with_suffix(".pub").unlink()
    make_key(ssh_server.key, passphrase="open sesame")
    with (
        pytest.raises(HostAuthError, match="ssh-add") as caught,
        SshHost.named("board", ssh_server.config) as host,
    ):
        host.connect()
    assert "sesame" not in str(caught.value)


def test_a_file_that_is_no_key(ssh_server: SshServer) -> None:
    ssh_server.key.write_text("nonsense")
    with (
        pytest.raises(HostAuthError, match="cannot be used"),
        SshHost.named("board", ssh_server.config) as host,
    ):
        host.connect()


def test_through_another_host(
    ssh_server: SshServer, tmp_path: Path, new_port: Callable[[], int]
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    with running_ssh_server(folder, new_port(), {"WHERE": "inner"}) as inner:
        ssh_server.configure(
            "ProxyJump board",
            f"Port {inner.port}",
            f"UserKnownHostsFile {inner.known_hosts}",
            f"IdentityFile {inner.key}",
            host="inner",
        )
        with SshHost.named("inner", ssh_server.config) as host:
            assert _run(host, "echo $WHERE") == (0, b"inner\n")
            assert "Accepted publickey" in ssh_server.log.read_text()
            inner.stop()
            with pytest.raises((StreamClosed, HostUnreachableError)):
                _run(host, "true")
            with pytest.raises(HostUnreachableError, match="from board to 127"):
                _run(host, "true")


@contextlib.contextmanager
def _listener(answer: bytes) -> Iterator[int]:
    """Something that is no SSH server: it says `answer`, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as links:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link = links.enter_context(server.accept()[0])
                    link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


class _EndsAt(Deadline):
    """A deadline that is over when it is asked for the given time."""

    def __init__(self, ask: int) -> None:
        super().__init__(30.0)
        self._left = ask

    def remaining(self) -> float:
        self._left -= 1
        if self._left < 0:
            raise DeadlineExceeded
        return super().remaining()


def _sockets() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(fd.readlink()).startswith("socket:")
    return found


def test_a_deadline_leaves_no_socket_wherever_it_strikes(ssh_server: SshServer) -> None:
    config = resolve_host("board", ssh_server.config)
    before = _sockets()
    for ask in range(100):
        try:
            transport = connect(config, _EndsAt(ask), None)
        except DeadlineExceeded:
            assert _sockets() == before, f"asked {ask} times"
        else:
            transport.close()
            break
    assert ask > 3
    assert _sockets() == before


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n"])
def test_a_host_that_hangs_costs_its_timeout_alone(tmp_path: Path, answer: bytes) -> None:
    with _listener(answer) as port:
        config = tmp_path / "config"
        config.write_text(
            f"Host hung\n  HostName 127.0.0.1\n  Port {port}\n  ConnectTimeout 1\n"
            f"  UserKnownHostsFile {tmp_path / 'none'}\n"
        )
        with pytest.raises(HostUnreachableError), SshHost.named("hung", config) as host:
            host.connect()


def test_what_is_no_ssh_server(tmp_path: Path) -> None:
    with (
        _listener(b"HTTP/1.1 400 Bad Request\r\n" * 500) as port,
        pytest.raises(HostUnreachableError) as caught,
        SshHost.named(f"127.0.0.1:{port}", tmp_path / "absent") as host,
    ):
        host.connect()
    assert str(caught.value).isprintable()
