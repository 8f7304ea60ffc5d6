"""The commands `qnnfarm worker` and `qnnfarm serve`. Heavy imports wait until they run."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import LabDb, MaxParallel, PoolFile
from harness.console import print_remark
from harness.errors import WrongUseError
from reports.errors import ReportError

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_BACKLOG = 128


def worker(
    db: LabDb = None,
    pool: PoolFile = None,
    max_parallel: MaxParallel = None,
    dead_after: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds after which a worker that is not heard of counts as dead; the same on "
            "all hosts.",
        ),
    ] = 30.0,
    builds: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            metavar="FOLDER",
            help="Run builds, too; they write below this folder, which all hosts share.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run cells and builds that --lab submits on this host.

    It runs until Ctrl-C or SIGTERM, which gives its cells and builds to other workers.

    Example: qnnfarm worker --db postgresql+psycopg://USER@HOST/DATABASE
    """
    with _extra("`qnnfarm worker`"):
        from plugins.lab.worker import work
    if db is None:
        raise WrongUseError("name the lab's database by --db or $QNNFARM_LAB")
    work(
        db,
        pool,
        max_parallel=max_parallel,
        dead_after_s=dead_after,
        builds=builds,
        on_progress=print_remark,
    )


def serve(
    db: Annotated[
        str, typer.Option("--db", help="Results database: a SQLite file, or a database URL.")
    ] = "results.db",
    pool: Annotated[
        Path | None,
        typer.Option(
            "--pool", help="pool.yaml; by default $QNNFARM_POOL, ./pool.yaml, or all adb devices."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets the whole network read.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8484,
    unix_socket: Annotated[
        Path | None,
        typer.Option(help="Listen on this socket instead, for a reverse proxy on this machine."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Another name of this machine under which browsers ask for the page. Can be "
            "repeated.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="People who may act: `USER TOKEN` a line, readable by you alone."
        ),
    ] = None,
    proxy_user: Annotated[
        str,
        typer.Option(
            metavar="HEADER",
            help="Header in which the proxy names its user, who may act. Needs --unix-socket.",
        ),
    ] = "",
) -> None:
    """Serve the lab's page: devices, what waits and runs, and the verdict, live.

    Everybody who reaches the page may read. Devices are released and drained, and alerts settled,
    only by users with a token, or whom a reverse proxy names.

    Example: qnnfarm serve --db results.db --port 8484
    """
    with _extra("`qnnfarm serve`"):
        import uvicorn

        from plugins.lab.page.access import Access, read_tokens
        from plugins.lab.page.app import BoundedConnection, make_app, most_connections
        from plugins.lab.page.board import BoardReader
    from harness.pool.pool import Pool

    if proxy_user and unix_socket is None:
        raise WrongUseError(
            "--proxy-user needs --unix-socket: whoever reaches a port can send that header"
        )
    access = Access(read_tokens(tokens) if tokens else {}, proxy_user)
    hosts = ["*"] if unix_socket else [*_LOOPBACK, host, socket.gethostname(), *(name or ())]
    listener = _listen(host, port, unix_socket)
    with listener:
        reader = BoardReader(Pool.open(pool, probe=False, on_progress=print_remark), db)
        app = make_app(reader, access, hosts, lambda: server.should_exit)
        config = uvicorn.Config(
            app, http=BoundedConnection, limit_concurrency=most_connections(),
            log_level="warning", access_log=False, server_header=False,
            forwarded_allow_ips="*" if unix_socket else "127.0.0.1", timeout_graceful_shutdown=5,
        )  # fmt: skip
        server = uvicorn.Server(config)
        print_remark(f"serving {_address(listener, unix_socket)}; Ctrl-C ends it")
        try:
            server.run(sockets=[listener])
        finally:
            if unix_socket:
                unix_socket.unlink(missing_ok=True)


def _listen(host: str, port: int, unix_socket: Path | None) -> socket.socket:
    """Open the socket before anything else, so that a port in use is told in one line."""
    try:
        if unix_socket is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            if unix_socket.is_socket() and not _answers(unix_socket):
                unix_socket.unlink()
            listener.bind(str(unix_socket))
            unix_socket.chmod(0o660)
            listener.listen(_BACKLOG)
            return listener
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = str(unix_socket or f"{host}:{port}")
        raise ReportError(
            f"cannot serve the lab's page at {where}: {error.strerror or str(error)}"
        ) from error


def _answers(path: Path) -> bool:
    """Return whether another process listens on a socket, which a killed one leaves behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _address(opened: socket.socket, unix_socket: Path | None) -> str:
    if unix_socket is not None:
        return str(unix_socket)
    host, port = opened.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Name the extra to install where imports for a lab fail, and `name`, which needs them."""
    try:
        yield
    except ImportError as error:
        reason = f"{name} needs {error.name}: pip install 'qnnfarm[lab]'"
        raise WrongUseError(reason) from error
