"""Service names and window sizes."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.virtual_device.shell import (
    ShellRequest,
    parse_shell_service,
    parse_window_size,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"shell:", ShellRequest(None, packets=False, terminal=True)),
        (b"shell:ls", ShellRequest(b"ls", packets=False, terminal=False)),
        (b"shell,v2:", ShellRequest(None, packets=True, terminal=True)),
        (b"shell,v2,raw:a:b", ShellRequest(b"a:b", packets=True, terminal=False)),
        (
            b"shell,v2,TERM=xterm-256color,pty:top",
            ShellRequest(b"top", packets=True, terminal=True, term="xterm-256color"),
        ),
        (b"shell,v2,TERM=$(reboot):x", ShellRequest(b"x", packets=True, terminal=False)),
        (b"exec:cat", ShellRequest(b"cat", packets=False, terminal=False)),
        (b"exec,v2:cat", None),
        (b"shells:", None),
        (b"shell", None),
        (b"sync:", None),
    ],
)
def test_service_names(name: bytes, expected: ShellRequest | None) -> None:
    assert parse_shell_service(name) == expected


def test_window_size() -> None:
    assert parse_window_size(b"24x80,640x480\0") == struct.pack("@4H", 24, 80, 640, 480)
    assert parse_window_size(b"99999x1,0x0") is None


@given(st.binary(max_size=64))
def test_no_window_size_and_no_name_breaks_the_parser(data: bytes) -> None:
    parse_window_size(data)
    parse_shell_service(data)
