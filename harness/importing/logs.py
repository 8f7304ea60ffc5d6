"""Logs as programs print them."""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[+-]?[0-9]{1,3})?)"


def log_lines(text: str) -> list[str]:
    """Split a log into lines without colours; line n is element n - 1."""
    return [_COLOUR.sub("", line[:100_000].rstrip("\r")) for line in text.split("\n")]
