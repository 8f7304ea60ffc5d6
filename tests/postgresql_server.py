"""A real PostgreSQL server of a test's own: a private cluster, on loopback and on a Unix socket.

def test_something(new_postgresql_server):
    with new_postgresql_server() as server:
        server.create("results")
"""

import base64
import contextlib
import hashlib
import hmac
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.system import program

USER = "lab"
_START_TIMEOUT_S = 240.0
_STARTS = 5
# What a crash of the machine would lose is of no interest to a test, but that of the server is.
_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "listen_addresses": "127.0.0.1",
    "log_statement": "none",
    "autovacuum": "off",
}


@dataclass
class PostgresqlServer:
    """A running server; who connects needs its password.

    Attributes:
        folder: holds the cluster, its log, and the Unix socket.
        port: on 127.0.0.1.
    """

    folder: Path
    port: int
    max_connections: int = 60
    user: str = USER
    _process: "subprocess.Popen[bytes] | None" = None

    @property
    def password(self) -> str:
        return (self.folder / "password").read_text()

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def url(self, database: str, *, socket: bool = False) -> str:
        """What reaches a database, password and all: by loopback, or by the Unix socket."""
        who = f"postgresql+psycopg://{self.user}:{self.password}@"
        if socket:
            return f"{who}/{database}?host={self.folder}&port={self.port}"
        return f"{who}127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> "psycopg.Connection[tuple[object, ...]]":
        """A connection past the product, in autocommit; the caller closes it."""
        return psycopg.connect(
            host=str(self.folder),
            port=self.port,
            user=self.user,
            password=self.password,
            dbname=database,
            autocommit=True,
        )

    def ask(self, database: str, statement: str) -> list[tuple[object, ...]]:
        """Run a statement past the product; its rows."""
        with contextlib.closing(self.connect(database)) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create(self, database: str, *, encoding: str = "UTF8") -> None:
        """A new, empty database."""
        self._tell(
            sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {}").format(
                sql.Identifier(database), sql.Literal(encoding)
            )
        )

    def drop(self, database: str) -> None:
        """Remove a database, whoever is connected to it."""
        self._tell(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(
            sql.Identifier(database)
        ))  # fmt: skip

    def empty(self, database: str) -> None:
        """Make a database as it was when it was new, whoever is connected to it.

        A new one takes four times as long, and the first to connect to it as long again.
        """
        with contextlib.closing(self.connect(database)) as connection:
            connection.execute(
                "SET default_transaction_read_only = off; SET lock_timeout = 0; "
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            connection.execute(
                sql.SQL(
                    "ALTER DATABASE {} RESET ALL; DROP SCHEMA public CASCADE; "
                    "CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC"
                ).format(sql.Identifier(database))
            )

    def set_clock(self, database: str, ahead_s: float) -> None:
        """Set the time that connections see which are made after the first call."""
        for name in ("now", "clock_timestamp"):
            self.ask(
                database,
                f"CREATE OR REPLACE FUNCTION public.{name}() RETURNS timestamptz LANGUAGE sql "
                f"AS $$ SELECT pg_catalog.{name}() + interval '{ahead_s:f} s' $$",
            )
        self.ask(database, f"ALTER DATABASE {database} SET search_path = public, pg_catalog")

    def _tell(self, *statements: sql.Composed) -> None:
        with contextlib.closing(self.connect()) as connection:
            for statement in statements:
                connection.execute(statement)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = [f"--{name}={value}" for name, value in _SETTINGS.items()]
        command = [
            *_as_its_user(),
            # However this process ends, the server does not outlive it.
            "--pdeathsig=QUIT",
            str(program("postgres")),
            "-D",
            str(self.folder / "data"),
            *("-p", str(self.port), "-k", str(self.folder), "-N", str(self.max_connections)),
            *options,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"PostgreSQL does not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        # Another's server on that port would not be ours, but the socket is in our folder.
        with contextlib.suppress(psycopg.OperationalError):
            self.connect().close()
            return True
        return False

    def stop(self) -> None:
        """End it at once, with all its connections; what was committed is kept."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGQUIT)  # an "immediate" shutdown
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children see that and end
            self._process.wait()
        self._process = None


@contextlib.contextmanager
def running_postgresql_server(
    new_port: Callable[[], int], *, max_connections: int = 60, cluster: Path | None = None
) -> Iterator[PostgresqlServer]:
    """A server with a new cluster, which goes with it.

    Args:
        cluster: one that `make_cluster` has made, of which it is a copy; to make one takes longer
            than most tests of it.
    """
    with _folder_of_its_user() as folder:
        if cluster is None:
            _initialize(folder)
        else:
            subprocess.run(["cp", "-a", f"{cluster}/.", folder], check=True)
        server = PostgresqlServer(folder, new_port(), max_connections)
        try:
            for left in reversed(range(_STARTS)):
                try:
                    server.start()
                    break
                except TimeoutError:
                    if not left:
                        raise
                    server.port = new_port()  # somebody may have taken it meanwhile
            yield server
        finally:
            server.stop()


def make_cluster(folder: Path) -> None:
    """Make a cluster for servers to copy, in a folder that is not there yet."""
    with _folder_of_its_user() as made:
        _initialize(made)
        subprocess.run(["cp", "-a", made, folder], check=True)


@contextlib.contextmanager
def _folder_of_its_user() -> Iterator[Path]:
    """A folder of the server's user; others may be closed to them, or too deep for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="qnnfarm-pg-", dir="/tmp"))
    try:
        if os.geteuid() == 0:
            os.chown(folder, _other_user().pw_uid, _other_user().pw_gid)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _initialize(folder: Path) -> None:
    password, verifier = f"geheim{secrets.token_hex(8)}", folder / "verifier"
    (folder / "password").write_text(password)
    verifier.write_text(_verifier(password) + "\n")
    if os.geteuid() == 0:
        os.chown(verifier, _other_user().pw_uid, _other_user().pw_gid)
    command: Sequence[str] = [
        *_as_its_user(),
        str(program("initdb")),
        *("--pgdata", str(folder / "data"), "--username", USER, "--wal-segsize", "1"),
        *("--pwfile", str(verifier), "--auth", "scram-sha-256"),
        *("--encoding", "UTF8", "--no-locale", "--no-sync"),
    ]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"initdb: {done.stderr or done.stdout}")


def _verifier(password: str) -> str:
    """What the server keeps of a password (RFC 5803): the 4096 rounds of its own take 4 ms.

    Each transaction of the product is a connection, and each takes these rounds.
    """
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    keys = (salt, stored, hmac.digest(salted, b"Server Key", "sha256"))
    return "SCRAM-SHA-256$1:{}${}:{}".format(*(base64.b64encode(key).decode() for key in keys))


def _as_its_user() -> list[str]:
    """What runs a command as the server's user; PostgreSQL refuses to run as root."""
    command = [str(program("setpriv"))]
    if os.geteuid() == 0:
        user = _other_user()
        command += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return command


def _other_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.skip("needs a user other than root to run PostgreSQL: useradd --system postgres")
