"""As much of DER (ITU-T X.690) as an RSA key needs."""

_INTEGER, _OCTET_STRING, _SEQUENCE = 0x02, 0x04, 0x30


class DerReader:
    """Reads one value after the other from untrusted bytes; `ValueError` where they do not fit."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def integer(self) -> int:
        """The next value, a non-negative integer."""
        value = int.from_bytes(self._take(_INTEGER), "big", signed=True)
        if value < 0:
            raise ValueError("negative integer in a key")
        return value

    def octet_string(self) -> bytes:
        """The next value, a byte string."""
        return self._take(_OCTET_STRING)

    def sequence(self) -> "DerReader":
        """A reader over the next value, a sequence."""
        return DerReader(self._take(_SEQUENCE))

    def _bytes(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise ValueError("truncated value")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _take(self, tag: int) -> bytes:
        found, length = self._bytes(2)
        if found != tag:
            raise ValueError(f"tag {found:#x} where {tag:#x} belongs")
        if length & 0x80:
            length = int.from_bytes(self._bytes(length & 0x7F), "big")
        return self._bytes(length)
