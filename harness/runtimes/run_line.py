"""The last line that `run.sh` prints: how a command ended (device_scripts/README.md)."""

import re
from dataclasses import dataclass

_LINE = re.compile(
    r"^qnnfarm-run exit=(?P<exit>\d{1,3}) signal=(?P<signal>\d{1,3}) timed_out=(?P<timed_out>[01])"
    r" peak_rss_kb=(?P<peak>\d{1,12}) elapsed_ms=(?P<elapsed>-?\d{1,12})"
    r" reason=(?P<reason>[A-Za-z-]{1,32}) leftover=(?P<leftover>\d{1,9})$"
)


@dataclass(frozen=True)
class RunOutcome:
    """How a command ended on the device.

    Attributes:
        signal: what killed it, 0 for none.
        reason: `exited`, `timeout`, `log-too-big`, `log-gone`, or the signal that interrupted
            `run.sh`.
        peak_rss_bytes: highest resident set of its largest process, as the kernel saw it; None
            where it was looked at too seldom to know.
        leftover: processes of the run that not even SIGKILL ended.
    """

    exit_status: int
    signal: int
    timed_out: bool
    reason: str
    peak_rss_bytes: int | None
    elapsed_s: float
    leftover: int

    @property
    def succeeded(self) -> bool:
        """Whether it left by itself with status 0."""
        return self.reason == "exited" and self.exit_status == 0

    def in_words(self) -> str:
        """How it ended, to stand after the command's name."""
        match self.reason:
            case "timeout":
                return f"hung and was killed after {self.elapsed_s:.0f} s"
            case "log-too-big":
                return "was killed for what it wrote: its log grew too big"
            case "log-gone":
                return "was ended, since its folder on the device was removed"
            case "exited" if self.signal:
                return f"was killed by signal {self.signal} after {self.elapsed_s:.1f} s"
            case "exited":
                return f"ended with status {self.exit_status}"
            case _:
                return f"was interrupted ({self.reason})"


def parse_run_line(output: str) -> RunOutcome | None:
    """The outcome in the last line of `run.sh`'s output; None when that is not there."""
    lines = output.rstrip().splitlines()
    match = _LINE.match(lines[-1].strip()) if lines else None
    if match is None:
        return None
    return RunOutcome(
        exit_status=int(match["exit"]),
        signal=int(match["signal"]),
        timed_out=match["timed_out"] == "1",
        reason=match["reason"],
        peak_rss_bytes=int(match["peak"]) * 1024 or None,
        elapsed_s=max(0, int(match["elapsed"])) / 1000,
        leftover=int(match["leftover"]),
    )
