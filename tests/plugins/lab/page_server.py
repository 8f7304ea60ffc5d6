"""The lab's page, served in a thread, and what asks it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import uvicorn

from harness.pool.pool import Pool
from plugins.lab.page.access import Access
from plugins.lab.page.app import BoundedConnection, make_app
from plugins.lab.page.board import BoardReader


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers = response.status, response.headers
        self.text = response.read().decode()


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str = "/", **headers: str) -> Answer:
        return self._ask("GET", path, None, headers)

    def post(self, path: str, headers: Mapping[str, str] = {}, **form: str) -> Answer:
        return self._ask("POST", path, urlencode(form), headers)

    def events(self) -> Iterator[dict[str, object]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/events")
        with closing(connection), connection.getresponse() as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def _ask(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=200)
        with closing(connection):
            connection.request(method, path, body, dict(headers))
            return Answer(connection.getresponse())


@contextmanager
def serving(pool_file: Path, results: Path | str, access: Access) -> Iterator[Client]:
    opened = socket.create_server(("127.0.0.1", 0))
    reader = BoardReader(Pool.open(pool_file, probe=False), str(results))
    app = make_app(reader, access, ["127.0.0.1"], lambda: server.should_exit)
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedConnection, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    try:
        yield Client(opened.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        opened.close()


def eventually(read: Callable[[], str], part: str) -> str:
    for _ in range(2000):
        if part in (text := read()):
            return text
        time.sleep(0.1)
    raise AssertionError(text)
