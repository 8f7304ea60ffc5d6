"""Cost of sampling a run: `python -m benchmarks.telemetry [--seconds N]`.

The sampler of `device_scripts/telemetry.sh` at 10 Hz over a folder like a phone's sysfs (two CPU
clocks, DDR, battery, 60 thermal zones), under each shell that is here, beside a loop that reads
twenty files with `cat` and waits with `sleep`, as one would write it. CPU time is the kernel's, of
the process with all its children, as shares of one core; a run of one second tells the start apart
from the rest.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "device_scripts" / "telemetry.sh"
PERIOD_CS = 10
LIMIT = 0.01
ZONES = 60

_NAIVE = """\
while :; do
  echo >>"$3"
  for file in $2; do cat "$file"; done
  sed -n 's/^VmRSS: *//p' "/proc/$1/status"
  sleep 0.1
done
"""


@dataclass(frozen=True)
class Cost:
    """One sampler over one run."""

    cpu_s: float
    elapsed_s: float
    samples: int

    @property
    def rate_hz(self) -> float:
        """Samples a second."""
        return self.samples / self.elapsed_s


def make_sysfs(root: Path) -> tuple[str, ...]:
    """Make a folder like a phone's sysfs; return the files that are sampled."""
    files = {
        "class/devfreq/ddr/cur_freq": "4224000000",
        "class/power_supply/battery/type": "Battery",
        "class/power_supply/battery/current_now": "-350000",
        "class/power_supply/battery/voltage_now": "4012000",
    }
    for cpu in range(8):
        folder = f"devices/system/cpu/cpu{cpu}/cpufreq"
        files[f"{folder}/related_cpus"] = "0 1 2 3 4 5" if cpu < 6 else "6 7"
        files[f"{folder}/scaling_cur_freq"] = "1804800"
        files[f"{folder}/scaling_max_freq"] = "3532800"
    kinds = ("cpu", "nsphvx", "gpuss", "ddr", "skin-therm", "battery", "pmic", "aoss")
    for zone in range(ZONES):
        files[f"class/thermal/thermal_zone{zone}/type"] = f"{kinds[zone % 8]}-{zone}"
        files[f"class/thermal/thermal_zone{zone}/temp"] = str(30000 + 100 * zone)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tuple(str(root / name) for name in files if name.endswith(("_freq", "_now", "temp")))


def measure(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Return CPU seconds with children, and wall seconds, of a command whose stdin is a pipe."""
    began = time.monotonic()
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        command, env=dict(environment), stdin=read_end, stdout=subprocess.DEVNULL
    )
    os.close(read_end)
    os.close(write_end)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, time.monotonic() - began


def sample(shell: str, seconds: float, run_dir: Path, environment: Mapping[str, str]) -> Cost:
    """Sample a process that sleeps for `seconds`."""
    began = Path("/proc/uptime").read_text(encoding="ascii").split()[0].split(".")
    with subprocess.Popen([shutil.which("sleep") or "/bin/sleep", str(seconds)]) as runner:
        words = ["100", str(runner.pid), str(os.getpid()), *began]
        command = [shell, str(SCRIPT), "sample", str(run_dir), str(PERIOD_CS), *words]
        cpu_s, elapsed_s = measure(command, environment)
        runner.wait()
    recording = (run_dir / ".qnnfarm" / "telemetry").read_text(encoding="ascii")
    return Cost(cpu_s, elapsed_s, sum(line.startswith("s ") for line in recording.splitlines()))


def sample_naively(
    seconds: float, files: Sequence[str], rounds: Path, environment: Mapping[str, str]
) -> Cost:
    """Read the same files with `cat`, `sed` and `sleep`; its rate falls with what it costs.

    Args:
        rounds: file for a line a round; new.
    """
    words = ["sh", str(os.getpid()), " ".join(files), str(rounds)]
    cpu_s, elapsed_s = measure(["timeout", str(seconds), "sh", "-c", _NAIVE, *words], environment)
    return Cost(cpu_s, elapsed_s, len(rounds.read_text().splitlines()))


def main() -> int:
    """Print the table; 1 when a sampler that can wait without a fork exceeds the limit.

    Also when none was there to be measured, or one took less than half the samples it is to take:
    what does not sample costs nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    over: list[str] = []
    idle: list[str] = []
    kept: list[str] = []
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        root = Path(folder)
        files = make_sysfs(root / "sys")
        (root / "run" / ".qnnfarm").mkdir(parents=True)
        environment = {"PATH": os.environ["PATH"], "QNNFARM_SYS_ROOT": str(root / "sys")}
        print(f"{'sampler':34} {'of a core':>10} {'start':>9} {'rate':>9}")
        for shell in ("mksh", "bash", "dash"):
            path = shutil.which(shell)
            if path is None:
                continue
            for name, extra in _variants(shell):
                short = sample(path, 1, root / "run", environment | extra)
                whole = sample(path, seconds, root / "run", environment | extra)
                share = _share(short, whole)
                rate = f"{whole.rate_hz:6.1f} Hz"
                print(f"{name:34} {share:>10.2%} {short.cpu_s * 1e3:>6.0f} ms {rate:>9}")
                if not extra:
                    slow = whole.rate_hz < 0.5 * 100 / PERIOD_CS
                    (idle if slow else over if share > LIMIT else kept).append(name)
        naive = sample_naively(seconds / 3, files[:20], root / "rounds", environment)
        share, rate = naive.cpu_s / naive.elapsed_s, f"{naive.rate_hz:6.1f} Hz"
        print(f"{'cat, sed and sleep, 20 files':34} {share:>10.2%} {'':>9} {rate:>9}")
    told = (("kept by", kept), ("exceeded by", over), ("too few samples to tell:", idle))
    for verdict, names in told:
        if names:
            print(f"limit {LIMIT:.0%} of a core: {verdict} {'; '.join(names)}")
    if not kept:
        print("no sampler kept the limit")
    return int(bool(over or idle or not kept))


def _variants(shell: str) -> tuple[tuple[str, dict[str, str]], ...]:
    """Dash hands over to a shell that can wait; kept to itself it has to fork."""
    if shell != "dash":
        return ((shell, {}),)
    alone = {"QNNFARM_TELEMETRY_SHELL": "dash"}
    return ((f"{shell}, handing over", {}), (f"{shell} alone, waiting by fork", alone))


def _share(short: Cost, whole: Cost) -> float:
    return max(0.0, (whole.cpu_s - short.cpu_s) / (whole.elapsed_s - short.elapsed_s))


if __name__ == "__main__":
    sys.exit(main())
