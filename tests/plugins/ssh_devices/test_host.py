"""Connections to a real OpenSSH server: its key, our keys, their loss."""

import contextlib
import gc
import io
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko.common import cMSG_CHANNEL_EOF

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import StreamClosed
from harness.errors import HostAuthError, HostError, HostUnreachableError
from plugins.ssh_devices import host as host_module
from plugins.ssh_devices.config import resolve_host
from plugins.ssh_devices.connection import connect
from plugins.ssh_devices.host import SshHost, closing_by, run, stands
from plugins.ssh_devices.transport import sftp_files
from tests.plugins.ssh_devices.ssh_server import SshServer, make_key, running_ssh_server
from tests.striking import FAILURES, EndsAt, recorded_links


def _run(
    host: SshHost, line: str, stdin: bytes = b"", timeout_s: float = 120.0
) -> tuple[int, bytes]:
    output = io.BytesIO()
    return run(host, line, stdin, output, io.BytesIO(), Deadline(timeout_s)), output.getvalue()


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


def test_a_shell_there_that_is_killed_is_no_success(host: SshHost) -> None:
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


def test_an_end_of_input_that_comes_too_late_ends_no_connection(
    ssh_server: SshServer, host: SshHost
) -> None:
    """A command may end, and its channel be closed, while we are about to end its input."""
    channel = host.session(Deadline(60))
    channel.exec_command("true")
    while not channel.closed:
        channel.status_event.wait(0.01)
    late = paramiko.Message()
    late.add_byte(cMSG_CHANNEL_EOF)
    late.add_int(channel.remote_chanid)
    channel.get_transport()._send_user_message(late)  # type: ignore[attr-defined]
    assert _run(host, "echo fine")[1] == b"fine\n"
    assert ssh_server.log.read_text().count("Accepted publickey") == 1


def _run_and_lose(server: SshServer, host: SshHost) -> None:
    """A command whose connection is cut once it has said something."""

    class Dropping(io.BytesIO):
        def write(self, _data: object, /) -> int:
            server.drop_connections()
            return 0

    run(host, "echo here; sleep 60", None, Dropping(), io.BytesIO(), Deadline(60))


@pytest.fixture
def late_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is lost knows so only a while after its channels have ended."""
    end = paramiko.Channel._unlink  # type: ignore[attr-defined]

    def end_and_rest(channel: paramiko.Channel) -> None:
        end(channel)
        time.sleep(1)

    monkeypatch.setattr(paramiko.Channel, "_unlink", end_and_rest)


def test_a_loss_that_is_known_late_is_no_death_of_the_command(
    ssh_server: SshServer, host: SshHost, late_loss: None
) -> None:
    with pytest.raises(StreamClosed):
        _run_and_lose(ssh_server, host)
    assert _run(host, "echo again") == (0, b"again\n")
    assert ssh_server.log.read_text().count("Accepted publickey") == 2


def test_a_loss_that_nobody_knows_of_yet_costs_no_command(
    ssh_server: SshServer, host: SshHost, late_loss: None
) -> None:
    channel = host.session(Deadline(120))
    ssh_server.drop_connections()
    channel.status_event.wait()
    assert _run(host, "echo again") == (0, b"again\n")


@pytest.mark.parametrize("timed", [True, False], ids=["by its timer", "at the end"])
def test_closing_a_channel_whose_connection_is_lost_is_no_failure(
    host: SshHost, monkeypatch: pytest.MonkeyPatch, *, timed: bool
) -> None:
    def lost(_message: object) -> None:
        raise EOFError

    channel = host.session(Deadline(120))
    monkeypatch.setattr(channel.get_transport().packetizer, "send_message", lost)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with closing_by(channel, Deadline(3.0 if timed else 300.0)):
        while timed and not channel.closed:
            time.sleep(0.01)
    assert channel.closed
    assert failed == []


def test_a_host_that_gives_no_answer_counts_as_lost(ssh_server: SshServer, host: SshHost) -> None:
    channel = host.session(Deadline(120))
    assert stands(channel)
    with ssh_server.suspended():
        assert not stands(channel, patience_s=0.5)


def test_a_host_that_went_away(ssh_server: SshServer, host: SshHost) -> None:
    assert _run(host, "true")[0] == 0
    ssh_server.stop()
    with pytest.raises((StreamClosed, HostUnreachableError)):
        _run(host, "true")
    with pytest.raises(HostUnreachableError, match="refused"):
        _run(host, "true")


def _refusal(server: SshServer, name: str = "board") -> HostError:
    """Return why a host is not connected to."""
    with pytest.raises(HostError) as caught, SshHost.named(name, server.config) as host:
        host.connect()
    return caught.value


def test_a_host_with_another_key_than_known_is_not_logged_in_to(ssh_server: SshServer) -> None:
    ssh_server.known_hosts.write_text("")
    fingerprint = subprocess.run(
        ["ssh-keygen", "-l", "-f", ssh_server.folder / "host_key.pub"],
        capture_output=True, text=True, check=True,
    ).stdout.split()[1]  # fmt: skip
    unknown = str(_refusal(ssh_server))
    for fact in (fingerprint, f"{ssh_server.known_hosts}", f"[127.0.0.1]:{ssh_server.port}"):
        assert fact in unknown
    ssh_server.trust(make_key(ssh_server.folder / "another"))
    assert "is NOT the one" in str(_refusal(ssh_server))
    assert "Accepted" not in ssh_server.log.read_text()


def test_no_key_of_ours_is_accepted(ssh_server: SshServer) -> None:
    ssh_server.authorized_keys.write_text("")
    error = _refusal(ssh_server)
    assert isinstance(error, HostAuthError)
    assert "none of 1 keys" in str(error)


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
    assert "none of 0 keys" in str(_refusal(ssh_server, "named"))


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
    assert "the SSH agent does not sign with its key test" in str(_refusal(ssh_server, "any"))


def test_a_key_with_a_passphrase_says_what_to_do(ssh_server: SshServer) -> None:
    ssh_server.key.unlink()
    ssh_server.key.with_suffix(".pub").unlink()
    make_key(ssh_server.key, passphrase="open sesame")
    advice = str(_refusal(ssh_server))
    assert "ssh-add" in advice
    assert "sesame" not in advice


def test_a_file_that_is_no_key(ssh_server: SshServer) -> None:
    ssh_server.key.write_text("nonsense")
    assert "cannot be used" in str(_refusal(ssh_server))


def test_through_a_chain_of_hosts(
    ssh_server: SshServer, tmp_path: Path, new_port: Callable[[], int]
) -> None:
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, more in (("middle", []), ("inner", ["ProxyJump board,middle"])):
            (tmp_path / name).mkdir()
            server = running_ssh_server(tmp_path / name, new_port(), {"WHERE": name})
            servers[name] = stack.enter_context(server)
            ssh_server.configure(
                *more,
                f"Port {servers[name].port}",
                f"UserKnownHostsFile {servers[name].known_hosts}",
                f"IdentityFile {servers[name].key}",
                host=name,
            )
        with SshHost.named("inner", ssh_server.config) as host:
            assert _run(host, "echo $WHERE") == (0, b"inner\n")
            for name, before in (("inner", "middle"), ("middle", "board")):
                servers[name].stop()
                with pytest.raises((StreamClosed, HostUnreachableError)):
                    _run(host, "true")
                with pytest.raises(HostUnreachableError, match=f"from {before} to 127"):
                    _run(host, "true")
        assert ssh_server.log.read_text().count("Accepted publickey") == 1


def test_through_a_command(ssh_server: SshServer, tmp_path: Path) -> None:
    """The real `ssh -W`, as before there was ProxyJump; it ends with the connection."""
    mark = tmp_path / "pid"
    ssh_server.configure(
        f"ProxyCommand sh -c 'echo $$ > {mark}; exec ssh -F {ssh_server.config} -W %h:%p board'",
        host="behind",
    )
    with SshHost.named("behind", ssh_server.config) as host:
        big = os.urandom(3_000_000)
        assert _run(host, "cat", big) == (0, big)
        pid = int(mark.read_text())
        assert Path(f"/proc/{pid}").exists()
        ssh_server.drop_connections()
        with contextlib.suppress(StreamClosed):
            _run(host, "true")
        assert _run(host, "echo again") == (0, b"again\n")
        assert int(mark.read_text()) != pid
    assert not Path(f"/proc/{mark.read_text().strip()}").exists()


def test_a_command_that_fails_says_why(ssh_server: SshServer) -> None:
    ssh_server.configure("ProxyCommand sh -c 'echo no way to %h >&2; exit 7'", host="lost")
    ssh_server.configure("ProxyCommand /nowhere/nc %h %p", host="missing")
    for name, reason in (
        ("lost", "its ProxyCommand ended with status 7: no way to 127.0.0.1"),
        ("missing", "its ProxyCommand ended with status 127: .*/nowhere/nc"),
    ):
        error = _refusal(ssh_server, name)
        assert isinstance(error, HostUnreachableError)
        assert re.search(reason, str(error))


def test_a_command_that_hangs_is_ended(ssh_server: SshServer, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    ssh_server.configure(
        f"ProxyCommand sh -c 'trap \"\" HUP; echo $$ > {mark}; sleep 600'",
        "ConnectTimeout 1",
        host="hung",
    )
    assert "no connection within 1 s" in str(_refusal(ssh_server, "hung"))
    assert not Path(f"/proc/{mark.read_text().strip()}").exists()


@contextlib.contextmanager
def _listener(answer: bytes, accepted: list[socket.socket] | None = None) -> Iterator[int]:
    """Something that is no SSH server: it says `answer`, and then nothing; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as links:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link = links.enter_context(server.accept()[0])
                    if accepted is not None:
                        accepted.append(link)
                    link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def links() -> Iterator[list[socket.socket]]:
    """What connections go over, as they are made."""
    with recorded_links() as made:
        yield made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[paramiko.Channel]:
    """The channels, as they are opened."""
    made: list[paramiko.Channel] = []
    real = paramiko.Transport.open_channel

    def open_channel(*args: object, **options: object) -> paramiko.Channel:
        made.append(real(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(paramiko.Transport, "open_channel", open_channel)
    return made


@FAILURES
def test_a_deadline_leaves_no_socket_wherever_it_strikes(
    ssh_server: SshServer, links: list[socket.socket], failure: type[BaseException]
) -> None:
    config = resolve_host("board", ssh_server.config)
    for ask in range(100):
        try:
            transport = connect(config, EndsAt(ask, failure), None)
        except failure:
            assert [link.fileno() for link in links] == [-1] * len(links), f"asked {ask} times"
        else:
            transport.close()
            break
    assert ask > 3
    assert len(links) >= ask
    assert links[-1].fileno() == -1


@pytest.mark.parametrize("lost", [False, True])
def test_a_deadline_leaves_no_way_through_another_host(
    ssh_server: SshServer, host: SshHost, opened: list[paramiko.Channel], *, lost: bool
) -> None:
    """Also where the connection to that one is lost at the same moment."""
    config = resolve_host("board", ssh_server.config)
    then = ssh_server.drop_connections if lost else lambda: None
    for ask in range(100):
        try:
            transport = connect(config, EndsAt(ask, then=then), host.channel_to)
        except DeadlineExceeded:
            assert all(channel.closed or lost for channel in opened), f"asked {ask} times"
        else:
            transport.close()
            break
    assert ask > 3
    assert opened[-1].closed


def _by_command(host: SshHost, deadline: Deadline) -> None:
    assert run(host, "cat", b"in", io.BytesIO(), io.BytesIO(), deadline) == 0


def _by_file(host: SshHost, deadline: Deadline) -> None:
    with sftp_files(host, deadline) as files:
        assert files.size("/dev/null/none") is None


@FAILURES
@pytest.mark.parametrize("use", [_by_command, _by_file])
def test_a_deadline_leaves_no_channel_wherever_it_strikes(
    host: SshHost,
    opened: list[paramiko.Channel],
    use: Callable[[SshHost, Deadline], None],
    failure: type[BaseException],
) -> None:
    host.connect()
    for ask in range(1000):
        try:
            use(host, EndsAt(ask, failure))
        except failure:
            assert all(channel.closed for channel in opened), f"asked {ask} times"
        else:
            break
    assert len(opened) > 1
    assert all(channel.closed for channel in opened)


def test_what_is_closed_while_it_connects_is_closed_at_the_end(
    host: SshHost, links: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed_meanwhile(*args: object) -> paramiko.Transport:
        transport = connect(*args)  # type: ignore[arg-type]
        host.close()
        return transport

    with monkeypatch.context() as patch:
        patch.setattr(host_module, "connect", closed_meanwhile)
        with pytest.raises(HostUnreachableError, match="closed meanwhile"):
            host.connect()
    assert [link.fileno() for link in links] == [-1]
    assert _run(host, "true")[0] == 0


@pytest.mark.needs("openssh-client")
def test_waiting_for_another_connection_keeps_its_own_deadline(tmp_path: Path) -> None:
    accepted: list[socket.socket] = []
    config = tmp_path / "config"
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(_listener(b"", accepted))
        config.write_text(
            f"Host hung\n  HostName 127.0.0.1\n  Port {port}\n  ConnectTimeout 600\n"
            f"  UserKnownHostsFile {tmp_path / 'none'}\n"
        )
        host = SshHost.named("hung", config)
        refused: list[HostUnreachableError] = []

        def connect_first() -> None:
            try:
                host.connect()
            except HostUnreachableError as error:
                refused.append(error)

        first = threading.Thread(target=connect_first)
        first.start()
        while not accepted:
            time.sleep(0.01)
        with pytest.raises(DeadlineExceeded):
            host.ensure_connected(Deadline(0.1))
        assert len(accepted) == 1
    first.join()
    assert len(refused) == 1


@pytest.mark.parametrize("answer", [None, b"", b"\0\0", b"\0\0\0\1\5", b"\0\0\0\0"])
def test_an_agent_that_is_none_leaves_nothing_and_costs_nothing(
    ssh_server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    """One that is gone, and what hangs up, or answers nonsense."""
    path = tmp_path / "agent"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as link:
                        if link.recv(1):
                            link.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        if answer is None:
            server.close()
        else:
            thread.start()
        try:
            with SshHost.named("board", ssh_server.config) as host:
                assert _run(host, "true")[0] == 0
            ssh_server.authorized_keys.write_text("")
            with (
                pytest.raises(HostAuthError, match="the SSH agent cannot be used"),
                SshHost.named("board", ssh_server.config) as host,
            ):
                host.connect()
        finally:
            if answer is not None:
                server.shutdown(socket.SHUT_RDWR)
                thread.join()
    gc.collect()  # of a socket that was left, this warns, and so fails


@pytest.mark.needs("openssh-client")
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


@pytest.mark.needs("openssh-client")
def test_an_invalid_ssh_server_is_refused(tmp_path: Path) -> None:
    with (
        _listener(b"HTTP/1.1 400 Bad Request\r\n" * 500) as port,
        pytest.raises(HostUnreachableError) as caught,
        SshHost.named(f"127.0.0.1:{port}", tmp_path / "absent") as host,
    ):
        host.connect()
    assert str(caught.value).isprintable()
