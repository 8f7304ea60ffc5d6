"""Changes that `prepare.sh` makes on a device, and undoes (device_scripts/README.md)."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import get_args

from harness.devices.base import Device
from harness.errors import one_line
from harness.telemetry.gate import ConditionRecord, Outcome

_RECORD = re.compile(
    r"record\|([a-z_]{1,30}(?:\.[0-9]{1,4})?)\|([a-z-]{1,20})"
    r"\|([^|]{0,200})\|([^|]{0,200})\|([^|]{0,2000})"
)
_MOST_RECORDS = 200
_TIMEOUT_S = 60.0


class Preparation:
    """The state of one device, changed and restored.

    What is changed is noted on the device first. So is what a session that died has left: the
    next `apply` undoes it before it does anything else.

    Args:
        device: whose.
        scripts_dir: our scripts on it.
        env: variables for the scripts, e.g. another root than `/sys`.
    """

    def __init__(
        self, device: Device, scripts_dir: str, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._device = device
        self._script = f"{scripts_dir}/prepare.sh"
        self._env = env

    def apply(self, changes: Sequence[str]) -> tuple[ConditionRecord, ...]:
        """Make changes by their names in `prepare.sh`; first undo what is left of another session.

        Raises:
            DeviceError: the device failed; a change it cannot make is a record, not an error.
        """
        return self._run("apply", *changes)

    def restore(self) -> tuple[ConditionRecord, ...]:
        """Undo all changes, the last one first.

        Raises:
            DeviceError: the device failed.
        """
        return self._run("restore")

    def _run(self, mode: str, *changes: str) -> tuple[ConditionRecord, ...]:
        command = ["sh", self._script, mode, self._device.work_root, *changes]
        result = self._device.shell(command, timeout_s=_TIMEOUT_S, env=self._env)
        return parse_records(result.stdout)


def parse_records(output: str) -> tuple[ConditionRecord, ...]:
    """Return the records in the output of `prepare.sh`; lines that are none are left out."""
    matches = filter(None, map(_RECORD.fullmatch, output.splitlines()))
    found = (
        ConditionRecord(
            name=match[1],
            outcome=match[2],  # type: ignore[arg-type]  # checked below
            reason=one_line(match[5]),
            before=one_line(match[3]) or None,
            after=one_line(match[4]) or None,
        )
        for match in matches
        if match[2] in get_args(Outcome)
    )
    return tuple(islice(found, _MOST_RECORDS))
