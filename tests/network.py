"""Links between this host and network namespaces, which a test cuts: packets are lost, unanswered.

Needs root, and `ip` of iproute2.
"""

import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.system import program

_MOST_S = 30.0


@dataclass(frozen=True)
class Link:
    """A cable to the network namespace of a process.

    Attributes:
        address: of this end.
    """

    name: str
    address: str

    def cut(self) -> None:
        """Lose all packets from now on, in both directions."""
        _ip("link", "set", self.name, "down")

    def mend(self) -> None:
        """Let packets pass again."""
        _ip("link", "set", self.name, "up")


@contextmanager
def linked_to(pid: int) -> Iterator[Link]:
    """A cable to a process, once that is in a network namespace of its own."""
    own, its = Path("/proc/self/ns/net"), Path(f"/proc/{pid}/ns/net")
    deadline = time.monotonic() + _MOST_S
    while its.readlink() == own.readlink():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    number = random.randrange(1 << 16)  # noqa: S311 - of a private network, which others have too
    net = f"10.{200 + number % 50}.{number >> 8}"
    link, far = Link(f"qn{os.getpid() % 100_000}.{number:04x}", f"{net}.1"), f"eth{number:04x}"
    _ip("link", "add", link.name, "type", "veth", "peer", "name", far, "netns", str(pid))
    try:
        _ip("address", "add", f"{link.address}/24", "dev", link.name)
        within = [str(program("nsenter")), "-t", str(pid), "-n"]
        _ip("address", "add", f"{net}.2/24", "dev", far, within=within)
        for device in ("lo", far):
            _ip("link", "set", device, "up", within=within)
        link.mend()
        yield link
    finally:
        with suppress(subprocess.CalledProcessError):  # it goes with the namespace, too
            _ip("link", "delete", link.name)


def _ip(*words: str, within: list[str] | None = None) -> None:
    command = [*(within or []), str(program("ip")), *words]
    subprocess.run(command, check=True, capture_output=True, text=True)
