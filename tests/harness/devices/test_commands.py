"""Commands for a shell, and what is kept of their output."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices.commands import BoundedOutput, command_line


@given(st.lists(st.binary(max_size=80), max_size=30), st.integers(2, 60))
def test_output_is_bounded_and_what_is_missing_is_counted(pieces: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.write(piece)
    text = output.text()
    whole = b"".join(pieces)
    if len(whole) <= limit - limit % 2:
        assert text == whole.decode("utf-8", "replace")
    else:
        assert output.dropped == len(whole) - 2 * (limit // 2)
        assert f"{output.dropped} bytes left out" in text


def test_what_no_command_can_hold() -> None:
    with pytest.raises(ValueError, match="NUL"):
        command_line(["echo", "a\0b"])
    with pytest.raises(ValueError, match="no name"):
        command_line("env", {"A; rm -rf /": "x"})
    assert command_line("exit $V", {"V": "3 4"}) == f"export V={shlex.quote('3 4')}; exit $V"
