"""A server on a device, which is in a network of its own, that sends back what it gets."""

import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from harness.devices.base import Device
from harness.errors import HarnessError

_SERVER = """
import os, socket, sys, threading
def answer(link):
    with link:
        while data := link.recv(65536):
            link.sendall(data)
with socket.create_server(("127.0.0.1", 0)) as server:
    with open(sys.argv[1] + ".new", "w") as file:
        print(server.getsockname()[1], os.getpid(), file=file)
    os.rename(file.name, sys.argv[1])
    while True:
        threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
"""


@contextmanager
def echo_on(device: Device) -> Iterator[int]:
    """Run it on the device's loopback; gives its port there."""
    root = shlex.quote(device.work_root)
    place = f"{root}/echo-{secrets.token_hex(4)}"
    serve = f"setsid python3 -c {shlex.quote(_SERVER)} {place} </dev/null >/dev/null 2>&1 &"
    wait = f"while [ ! -e {place} ]; do sleep 0.05; done; cat {place}"
    said = device.shell(f"mkdir -p {root}\n{serve}\n{wait}", timeout_s=120).stdout
    port, pid = said.split()
    try:
        yield int(port)
    finally:
        with suppress(HarnessError):  # the device may be gone
            device.shell(f"kill {pid}; rm -f {place}", timeout_s=120, check=False)
