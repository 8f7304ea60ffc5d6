"""System log of a device: the messages of Android and the kernel in the last seconds.

`logcat -T` takes seconds since 1970 since Android 8; the kernel's messages begin with the seconds
since the boot. Both are asked of the device's own clocks, so its time may be wrong.
"""

import contextlib
import re
from collections.abc import Mapping

from harness.devices.device import Device
from harness.errors import HarnessError

MOST_BYTES = 200_000
"""The newest bytes of a log that are kept."""
_TIMEOUT_S = 20.0
_MARGIN_S = 1.0
_NOT_FOUND = 127
_HEAD = "--------- beginning of "
EMPTY = "(empty)"
"""Text of a log without a line."""
_LOGCAT = """if command -v logcat >/dev/null 2>&1; then
  logcat -d -b main,system,crash -v threadtime -T "$(($(date +%s) - {seconds})).0" 2>&1 \
    | tail -c {bytes}
else exit 127; fi"""
_DMESG = "cut -d ' ' -f 1 /proc/uptime; dmesg 2>&1 | tail -c {bytes}"
_STAMP = re.compile(r"(?:<\d{1,3}>)?\[ {0,12}(\d{1,12}\.\d{1,9})\]")


def read_device_log(device: Device, seconds: float) -> Mapping[str, str]:
    """Read a device's logs of the last `seconds`, by their names: `logcat`, `dmesg`.

    Where a log cannot be read, its text says why. Devices that are no Android have no `logcat`. A
    device that fails is asked for nothing more.
    """
    since = round(seconds + _MARGIN_S)
    commands = {"logcat": _LOGCAT.format(seconds=since, bytes=MOST_BYTES)}
    commands["dmesg"] = _DMESG.format(bytes=MOST_BYTES)
    logs: dict[str, str] = {}
    for name, command in commands.items():
        try:
            result = device.shell(
                command, timeout_s=_TIMEOUT_S, check=False, max_output=2 * MOST_BYTES
            )
        except HarnessError as error:
            return logs | {name: f"cannot be read: {error}"}
        if result.exit_status != _NOT_FOUND:
            logs[name] = _without_heads(result.stdout) or result.stderr or EMPTY
    uptime, _, messages = logs["dmesg"].partition("\n")
    with contextlib.suppress(ValueError):  # no uptime: the text says why
        logs["dmesg"] = _since(messages, float(uptime[:20]) - since)
    return logs


def _without_heads(log: str) -> str:
    """Return a log; nothing if it has only logcat's heads, one for each of its buffers."""
    return "" if all(line.startswith(_HEAD) for line in log.splitlines()) else log


def _since(messages: str, uptime_s: float) -> str:
    """Drop the messages before a moment; lines without a stamp stay with the line before them."""
    lines = messages.splitlines(keepends=True)
    for number, line in enumerate(lines):
        stamp = _STAMP.match(line)
        if stamp is None and number:
            continue
        if stamp is None or float(stamp[1]) >= uptime_s:
            return "".join(lines[number:])
    return "(nothing in this time)\n" if lines else "(empty)"
