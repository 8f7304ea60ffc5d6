"""A real OpenSSH server on loopback: own port, own host key, own users' keys, as the current user.

@pytest.fixture
def ssh_server(tmp_path, new_port):
    with running_ssh_server(tmp_path, new_port()) as server:
        yield server
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.system import program

_START_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT_S = 120  # of a client, whose own 10 s a busy machine may need


class SshServer:
    """A running server, and a client configuration that reaches it as host `board`.

    Attributes:
        config: an `ssh_config`, with its known_hosts and the key that is let in beside it.
        key: that key.
        files: its files as they were once it ran.
    """

    def __init__(self, folder: Path, port: int, environment: Mapping[str, str]) -> None:
        self.folder, self.port, self.environment = folder, port, environment
        self.config = folder / "config"
        self.key = folder / "id_ed25519"
        self.known_hosts = folder / "known_hosts"
        self.authorized_keys = folder / "authorized_keys"
        self.log = folder / "sshd.log"
        self.files: dict[Path, bytes] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, *lines: str, host: str = "board") -> None:
        """Add a host to the client's configuration that leads here, with extra lines."""
        own = [
            f"Host {host}",
            "  HostName 127.0.0.1",
            f"  Port {self.port}",
            f"  User {getpass.getuser()}",
            f"  IdentityFile {self.key}",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.known_hosts}",
            "  GlobalKnownHostsFile none",
            f"  ConnectTimeout {_CONNECT_TIMEOUT_S}",
        ]
        # The first value of an option counts, so extra lines go before ours.
        text = "\n".join([own[0], *(f"  {line}" for line in lines), *own[1:]])
        before = self.config.read_text() if self.config.exists() else ""
        self.config.write_text(f"{before}{text}\n")

    def trust(self, host_key: Path | None = None) -> None:
        """Have known_hosts say that this server has that key, by default the right one."""
        public = (host_key or self.folder / "host_key").with_suffix(".pub").read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public[0]} {public[1]}\n")

    def start(self) -> None:
        """Start it, and wait until it greets."""
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {self.authorized_keys}",
            "PidFile none",
            "UsePAM no",
            "StrictModes no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "Subsystem sftp internal-sftp",
            "MaxStartups 200",
            "MaxSessions 200",
            "LogLevel VERBOSE",
        ]
        if self.environment:
            words = (f'"{name}={value}"' for name, value in self.environment.items())
            lines.append(f"SetEnv {' '.join(words)}")
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # as its service would; only root needs it
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(program("sshd")), "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._greets():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"sshd does not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _greets(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), _START_TIMEOUT_S) as link,
        ):
            return link.recv(4) == b"SSH-"
        return False

    def restore(self) -> None:
        """Run again with the files that it began with, no others, and an empty log."""
        for path in self.folder.iterdir():
            if path.is_file() and path not in self.files:
                path.unlink()
        for path, content in self.files.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
                path.chmod(0o600)
        os.truncate(self.log, 0)  # sshd appends
        if self._process is None:
            self.start()

    def drop_connections(self) -> None:
        """Kill the processes that serve connections; the server listens on, commands run on."""
        _kill(self._serving(), signal.SIGKILL)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """What serves connections stands still for a while; the kernel goes on."""
        pids = self._serving()
        _kill(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _kill(pids, signal.SIGCONT)

    def _serving(self) -> list[int]:
        assert self._process is not None
        return [pid for pid, name in _below(self._process.pid) if name.startswith("sshd")]

    def stop(self, *, commands_too: bool = True) -> None:
        """End it, with all its connections, and with what runs in them."""
        if self._process is None:
            return
        below = _below(self._process.pid)
        self._process.kill()
        self._process.wait()
        serving = (pid for pid, name in below if commands_too or name.startswith("sshd"))
        _kill(serving, signal.SIGKILL)
        self._process = None


def make_key(path: Path, passphrase: str = "") -> Path:
    """A new pair of keys."""
    keygen = str(program("ssh-keygen"))
    command = [keygen, "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


@contextlib.contextmanager
def running_ssh_server(
    folder: Path, port: int, environment: Mapping[str, str] | None = None
) -> Iterator[SshServer]:
    """A server whose files lie in `folder`; `environment` is set for what runs in it.

    Its user's home is empty: shells of logins read the start-up files there, and some of those, as
    pyenv's, hold a lock that a killed login leaves behind, for which all others wait.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    server = SshServer(folder, port, {"HOME": str(home), **(environment or {})})
    program("sshd")
    make_key(folder / "host_key")
    make_key(server.key)
    shutil.copy(server.key.with_suffix(".pub"), server.authorized_keys)
    server.trust()
    server.configure()
    server.start()
    server.files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    try:
        yield server
    finally:
        server.stop()


def _below(pid: int) -> list[tuple[int, str]]:
    """All processes below one, with the names of their programs."""
    command = [str(program("ps")), "-e", "-o", "pid=,ppid=,comm="]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    every = [(int(row.split()[0]), int(row.split()[1]), row.split()[2]) for row in rows]
    found = [(pid, "")]
    for one, _ in found:
        found += [(child, name) for child, parent, name in every if parent == one]
    return found[1:]


def _kill(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
