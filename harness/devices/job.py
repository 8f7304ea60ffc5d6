"""A command that can be killed with everything it started, wherever it runs.

Closing a connection ends a command on no transport for certain: adbd hangs up the shell alone, an
OpenSSH server nothing. So a job says first which process group it leads, and marks its environment;
killing it takes the group, and then whatever carries the mark, which finds also what went into a
session of its own. Process ids are reused, so the group is killed only if its leader is gone (then
the kernel keeps the number for the group) or is still the job's, and never after a reboot.

Without -z, the grep of many a phone (toybox before 0.8.9) sees no variable but the first.
"""

import re
import secrets
import shlex
import time
from dataclasses import dataclass, field

from harness.devices.commands import Sink

_VARIABLE = "QNNFARM_JOB"
_HELLO = "qnnfarm-job"
_MOST_NOISE = 64 * 1024

_KILL = """\
cd /proc || exit
t={token} p={pid}
read -r up rest <uptime
if [ -n "$p" ] && ! [ "${{up%%.*}}" -lt {age_s} ]; then
  if [ ! -e "$p" ] || ! grep -q . "$p/cmdline" || grep -qzF "$t" "$p/cmdline" "$p/environ"; then
    kill -s KILL -- "-$p"
  fi
fi
n=0
while [ "$n" -lt 10 ]; do
  found=$(grep -lzF "{variable}=$t" [0-9]*/environ)
  [ -n "$found" ] || break
  for f in $found; do kill -s KILL "${{f%/*}}"; done
  n=$((n + 1))
done
"""


@dataclass(slots=True)
class Job:
    """One run of a command line.

    Attributes:
        line: what the device's shell is to run.
        nested: run it in a shell below, so that its death by a signal is an exit status: some
            shells become the last command that they run, and where the transport tells no
            signals, nobody would be left to tell.
        group: its process group there, once it has said so.
        started: by the monotonic clock of this host.
    """

    line: str
    nested: bool = False
    group: int | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.monotonic)

    @property
    def script(self) -> str:
        """For a shell that leads a process group: says which, then runs the line."""
        line = self.line
        if self.nested:
            line = f"{shlex.join(['sh', '-c', line])}\nexit $?"
        return f"echo {_HELLO} {self.token} $$; export {_VARIABLE}={self.token}\n{line}"

    @property
    def kill_script(self) -> str:
        """Kills all that is left of it; may be run again and again."""
        age_s = int(time.monotonic() - self.started)
        script = _KILL.format(
            token=self.token, pid=self.group or "", variable=_VARIABLE, age_s=age_s
        )
        return f"{{\n{script}}} 2>/dev/null"

    def listening(self, sink: Sink) -> "JobOutput":
        """What is to get the job's stdout: it takes the greeting and hands the rest to `sink`."""
        return JobOutput(self, sink)


class JobOutput:
    """The stdout of a job, from its greeting on.

    What comes before it was written by the start files of the user's shell and goes; where no
    greeting comes, everything goes through.
    """

    def __init__(self, job: Job, sink: Sink) -> None:
        self._job = job
        self._sink = sink
        self._greeting = re.compile(rf"{_HELLO} {job.token} ([1-9][0-9]{{0,9}})\n".encode())
        self._begin: bytearray | None = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take what the stream brought."""
        if self._begin is None:
            self._sink.write(data)
            return
        self._begin += data
        if match := self._greeting.search(self._begin):
            self._job.group = int(match[1])
            del self._begin[: match.end()]
        elif len(self._begin) <= _MOST_NOISE:
            return
        self.close()

    def close(self) -> None:
        """Hand on what is still held back: the greeting was there, or will not come."""
        held, self._begin = self._begin, None
        if held:
            self._sink.write(bytes(held))
