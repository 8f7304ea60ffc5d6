"""Framing of the transport, on valid and hostile bytes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import AdbProtocolError
from plugins.virtual_android.protocol import (
    MIN_PAYLOAD,
    VERSION_WITH_CHECKSUMS,
    VERSION_WITHOUT_CHECKSUMS,
    AdbCommand,
    FrameDecoder,
    Message,
    pack_header,
)

_WORD = st.integers(0, 0xFFFFFFFF)
_MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([c for c in AdbCommand if c is not AdbCommand.CNXN]),
        _WORD,
        _WORD,
        st.binary(max_size=300),
    ),
    max_size=6,
)


def _feed(decoder: FrameDecoder, data: bytes, piece: int) -> list[Message]:
    messages: list[Message] = []
    position = 0
    while position < len(data):
        room = decoder.buffer()[:piece]
        assert len(room) > 0
        part = data[position : position + len(room)]
        room[: len(part)] = part
        position += len(part)
        message = decoder.commit(len(part))
        if message is not None:
            messages.append(message)
    return messages


@given(_MESSAGES, st.integers(1, 64), st.booleans())
def test_messages_survive_any_fragmentation(
    messages: list[tuple[AdbCommand, int, int, bytes]], piece: int, checked: bool
) -> None:
    decoder = FrameDecoder()
    decoder.peer_version = VERSION_WITH_CHECKSUMS if checked else VERSION_WITHOUT_CHECKSUMS
    data = b"".join(
        pack_header(command, arg0, arg1, payload, with_checksum=checked) + payload
        for command, arg0, arg1, payload in messages
    )
    found = _feed(decoder, data, piece)
    assert [(m.command, m.arg0, m.arg1, bytes(m.payload)) for m in found] == messages


@given(st.binary(max_size=200), st.integers(1, 64))
def test_garbage_is_a_protocol_error_or_waits_for_more(data: bytes, piece: int) -> None:
    with contextlib.suppress(AdbProtocolError):
        assert _feed(FrameDecoder(), data, piece) == []


def test_a_payload_above_the_limit_is_refused_before_memory_is_taken() -> None:
    header = pack_header(AdbCommand.WRTE, 1, 1, bytes(MIN_PAYLOAD + 1), with_checksum=False)
    with pytest.raises(AdbProtocolError, match="above the limit of 4096"):
        _feed(FrameDecoder(), header, 24)


def test_old_peers_are_held_to_checksums_and_new_ones_are_not() -> None:
    data = pack_header(AdbCommand.OKAY, 1, 1, b"abc", with_checksum=False) + b"abc"
    with pytest.raises(AdbProtocolError, match="checksum"):
        _feed(FrameDecoder(), data, 64)
    decoder = FrameDecoder()
    decoder.peer_version = VERSION_WITHOUT_CHECKSUMS
    assert len(_feed(decoder, data, 64)) == 1


@pytest.mark.parametrize("version", [VERSION_WITH_CHECKSUMS, VERSION_WITHOUT_CHECKSUMS])
def test_a_greeting_is_judged_by_its_own_version(version: int) -> None:
    data = pack_header(AdbCommand.CNXN, version, 4096, b"host::", with_checksum=False) + b"host::"
    if version < VERSION_WITHOUT_CHECKSUMS:
        with pytest.raises(AdbProtocolError, match="checksum"):
            _feed(FrameDecoder(), data, 64)
    else:
        assert _feed(FrameDecoder(), data, 64)[0].command is AdbCommand.CNXN
