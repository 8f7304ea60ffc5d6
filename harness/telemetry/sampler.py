"""Sampling a run: armed before it on the device, fetched after it.

Nothing is sent while the run goes on: the samples gather in a file of the run folder. A stream
would wake the device's adb daemon and its USB or Wi-Fi ten times a second, beside the runner.
The price is that the samples of a device that goes away in the middle are lost, with the run.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from harness.devices.device import Device
from harness.errors import DeviceError
from harness.results.records import TelemetrySeries
from harness.telemetry.protocol import MOST_BYTES, TelemetryRecording, parse_recording

DEFAULT_HZ = 10.0
SLOWEST_HZ, FASTEST_HZ = 1 / 60, 20.0
_TIMEOUT_S = 60.0


class Sampling:
    """The samples of one run; there once the block of `sampling` has ended.

    Attributes:
        recording: with the files that the device denied and the cost of sampling.
    """

    def __init__(self) -> None:
        self.recording = TelemetryRecording()

    @property
    def series(self) -> tuple[TelemetrySeries, ...]:
        """One a channel; none when nothing ran."""
        return self.recording.series


@contextmanager
def sampling(
    device: Device, scripts_dir: str, run_dir: str, *, hz: float = DEFAULT_HZ
) -> Iterator[Sampling]:
    """Sample the command that `run.sh` starts in `run_dir` inside the block.

    Of several, the last one's samples are kept. When the block fails, the samples until then are
    fetched all the same, if the device still answers.

    Args:
        device: where the run is.
        scripts_dir: our scripts on it.
        run_dir: the run folder on it.
        hz: samples a second, from 1/60 to 20.

    Raises:
        ValueError: no such rate.
        DeviceError: the device failed while arming or fetching.
    """
    if not SLOWEST_HZ <= hz <= FASTEST_HZ:
        raise ValueError(f"{hz:g} samples a second: from 1/60 to 20 are possible")
    arm = ["sh", f"{scripts_dir}/telemetry.sh", "arm", run_dir, str(round(100 / hz))]
    device.shell(arm, timeout_s=_TIMEOUT_S)
    result = Sampling()
    try:
        yield result
    except BaseException:
        with suppress(DeviceError):
            result.recording = _fetch(device, run_dir)
        raise
    result.recording = _fetch(device, run_dir)


def _fetch(device: Device, run_dir: str) -> TelemetryRecording:
    """Return the recording in a run folder, which is disarmed."""
    script = (
        f"cd {shlex.quote(run_dir)}/.qnnfarm && rm -f telemetry.period && "
        f"{{ [ ! -f telemetry ] || head -c {MOST_BYTES} telemetry; }}"
    )
    output = device.shell(script, timeout_s=_TIMEOUT_S, check=False, max_output=MOST_BYTES).stdout
    return parse_recording(output)
