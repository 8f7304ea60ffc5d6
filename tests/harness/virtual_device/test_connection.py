"""A connection whose other end holds the right key and does not keep to the protocol."""

import asyncio
import contextlib
import socket

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.virtual_device.connection import Connection, Service
from harness.virtual_device.protocol import HEADER_SIZE, Command, pack_header
from harness.virtual_device.stream import Stream

_PATIENCE_S = 200
_VERSION = 0x01000001

_KEY = rsa.generate_private_key(65537, 2048)


class _Peer:
    """An adb server's end of a connection to a device without anything on it."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.device = Connection("device::", lambda: [_KEY.public_key()], self._open, self._forget)

    def _forget(self, _: Connection) -> None:
        self.lost.set()

    def _open(self, name: bytes) -> Service | None:
        return self._echo if name == b"echo:" else None

    async def _echo(self, stream: Stream) -> None:
        while data := await stream.read():
            await stream.write(data)


_IDS = st.sampled_from([0, 1, 2, 3, 7, 0xFFFFFFFF])
_ORDERS = st.lists(
    st.one_of(
        st.tuples(st.just(Command.OPEN), _IDS, _IDS, st.sampled_from([b"echo:\0", b"\0", b"x:"])),
        st.tuples(st.sampled_from(list(Command)), _IDS, _IDS, st.binary(max_size=40)),
    ),
    max_size=25,
)


@given(_ORDERS, st.binary(max_size=30))
@settings(max_examples=150, deadline=None)
def test_an_owner_who_does_not_keep_to_the_protocol_leaves_nothing_behind(
    orders: list[tuple[Command, int, int, bytes]], garbage: bytes
) -> None:
    """Any messages in any order: the connection goes on or is closed, and then all is gone."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        peer = _Peer()
        near, far = _connected()
        with near:
            await loop.connect_accepted_socket(lambda: peer.device, far)
            await loop.sock_sendall(near, _message(Command.CNXN, _VERSION, 1 << 20, b"host::"))
            head = await _receive(near, HEADER_SIZE + 20)
            token = head[HEADER_SIZE:]
            signature = _KEY.sign(token, padding.PKCS1v15(), Prehashed(hashes.SHA1()))  # noqa: S303
            await loop.sock_sendall(near, _message(Command.AUTH, 2, 0, signature))
            await _receive(near, HEADER_SIZE)
            assert peer.device.online
            with contextlib.suppress(OSError):
                for order in orders:
                    await loop.sock_sendall(near, _message(*order))
                await loop.sock_sendall(near, garbage)
        async with asyncio.timeout(_PATIENCE_S):
            await peer.lost.wait()
            await peer.device.wait_for_services()
        await asyncio.sleep(0)
        assert not peer.device._streams
        assert not peer.device._tasks
        assert not failures

    asyncio.run(play())


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setblocking(False)
    return near, far


async def _receive(near: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(near, count - len(data))
        assert part
        data += part
    return data


def _message(command: Command, arg0: int, arg1: int, payload: bytes = b"") -> bytes:
    return pack_header(command, arg0, arg1, payload, with_checksum=True) + payload
