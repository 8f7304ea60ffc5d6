"""Programs of ExecuTorch for tests.

`segments.pte` and `inline.pte` were written by the serializer of ExecuTorch 1.5.1 (BSD-3-Clause,
`executorch.exir._serialize`): two methods for QNN that share one payload, in a segment and inside
of the FlatBuffer, and constants. The binary in the payload is `PLACEHOLDER`; graphs of the second
share weights.
"""

import struct
from pathlib import Path

FOLDER = Path(__file__).parent
PLACEHOLDER = b"not a context binary" * 40
SEGMENTS, INLINE = FOLDER / "segments.pte", FOLDER / "inline.pte"
HEAD = 256


def program_with(binary: bytes) -> bytes:
    """Return `segments.pte` with another binary in its segment, which ends the file."""
    data = SEGMENTS.read_bytes()
    start, old = data.index(PLACEHOLDER), HEAD + len(PLACEHOLDER)
    head = data[: start - HEAD].replace(
        struct.pack("<Q", old), struct.pack("<Q", HEAD + len(binary))
    )
    payload = data[start - HEAD : start].replace(
        struct.pack("<Q", len(PLACEHOLDER)), struct.pack("<Q", len(binary))
    )
    return head + payload + binary
