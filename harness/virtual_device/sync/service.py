"""The `sync:` service: answers requests of one client, one after the other."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from harness.errors import AdbProtocolError
from harness.virtual_device.connection import Service
from harness.virtual_device.filesystem import DeviceFilesystem
from harness.virtual_device.injection import Activity, Injector
from harness.virtual_device.storage import Storage
from harness.virtual_device.stream import ExactReader, Stream, StreamClosedError
from harness.virtual_device.sync import listing, wire
from harness.virtual_device.sync.receive import SendRequest, receive_file
from harness.virtual_device.sync.transmit import transmit_file


@dataclass(frozen=True, slots=True)
class SyncHost:
    """What the file protocol needs of its device."""

    filesystem: DeviceFilesystem
    storage: Storage
    faults: Injector


def open_sync(host: SyncHost, name: bytes) -> Service | None:
    """The service for `sync:`."""
    return _Session(host).serve if name == b"sync:" else None


class _Session:
    def __init__(self, host: SyncHost) -> None:
        self._host = host

    async def serve(self, stream: Stream) -> None:
        reader = ExactReader(stream)
        with contextlib.suppress(StreamClosedError):
            try:
                while await self._answer(stream, reader):
                    pass
            except AdbProtocolError as error:
                await stream.write(wire.failure(str(error)))

    async def _answer(self, stream: Stream, reader: ExactReader) -> bool:
        """Answer one request; false where it was the last."""
        ident, length = wire.REQUEST.unpack(await reader.exactly(wire.REQUEST.size))
        if ident == b"QUIT":
            return False
        if length > wire.MAX_PATH:
            raise AdbProtocolError(f"path of {length} bytes, above the limit of {wire.MAX_PATH}")
        name = await reader.exactly(length)
        if b"\0" in name:
            raise AdbProtocolError("path with a NUL byte")
        if ident in {b"SEND", b"SND2"}:
            return await self._receive(stream, reader, ident, name)
        path = self._resolve(name)
        if ident in {b"RECV", b"RCV2"}:
            if ident == b"RCV2":
                _, flags = wire.RECV_SETUP.unpack(await reader.exactly(wire.RECV_SETUP.size))
                _refuse_flags(flags)
            async with self._activity("pull", path) as activity:
                await transmit_file(stream, path, activity)
            return True
        async with self._activity("list", path):
            return await self._look(stream, ident, path)

    async def _look(self, stream: Stream, ident: bytes, path: str) -> bool:
        if ident in {b"STAT", b"LST2", b"STA2"}:
            await stream.write(await asyncio.to_thread(listing.stat_answer, ident, path))
        elif ident in {b"LIST", b"LIS2"}:
            version = 1 if ident == b"LIST" else 2
            await stream.write(await asyncio.to_thread(listing.list_answer, path, version))
        else:
            raise AdbProtocolError(f"unknown sync request {ident!r}")
        return True

    async def _receive(
        self, stream: Stream, reader: ExactReader, ident: bytes, name: bytes
    ) -> bool:
        if ident == b"SND2":
            setup = await reader.exactly(wire.SEND_SETUP.size)
            _, mode, flags = wire.SEND_SETUP.unpack(setup)
            _refuse_flags(flags)
        else:
            name, mode = _split_mode(name)
        request = SendRequest(self._resolve(name), mode)
        in_data = await asyncio.to_thread(self._host.filesystem.owns, request.path)
        storage = self._host.storage if in_data else None
        async with self._activity("push", request.path) as activity:
            return await receive_file(stream, reader, request, storage, activity)

    @contextlib.asynccontextmanager
    async def _activity(self, kind: str, path: str) -> AsyncIterator[Activity]:
        activity = await self._host.faults.begin(kind, detail=path)
        try:
            yield activity
        finally:
            activity.end()

    def _resolve(self, name: bytes) -> str:
        return self._host.filesystem.resolve(os.fsdecode(name))


def _split_mode(name: bytes) -> tuple[bytes, int]:
    """Path and mode of a SEND, which come as `PATH,MODE`."""
    path, comma, mode = name.rpartition(b",")
    if not comma or not mode.isdigit() or len(mode) > 10:
        raise AdbProtocolError("SEND without a mode")
    return path, int(mode)


def _refuse_flags(flags: int) -> None:
    if flags:
        raise AdbProtocolError(f"transfer flags {flags:#x}, of which none were advertised")
