"""The report and the alerts of a long history: time, memory, size, and what a browser needs.

    python -m benchmarks.report [--series 500] [--nights 365] [--folder DIR] [--db URL]

Runs are made up: nights of several containers on several phones, written straight into the tables
of a SQLite file or of an empty database in PostgreSQL. Each command runs in a process of its own:
`alerts ls` of all nights, again with nothing new, and after a new night of a tenth of the series;
the report. The browser is headless Chromium. It exits with 1 if a limit is not kept.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import insert

from harness.results import schema
from harness.results.provenance import this_writer
from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    OutputCheck,
    Provenance,
    Run,
    WorkloadRecord,
)
from harness.results.rows import row_of
from harness.results.store import ResultsStore
from tools.screenshots import open_browser

METRICS = ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s")
REPETITIONS, WARMUPS = 5, 1
PHONES, PROMPTS = 7, (128, 512)
START = datetime(2024, 1, 1, 2, tzinfo=UTC)
MOST_REPORT_S, MOST_MB, MOST_VISIBLE_S = 20.0, 10.0, 1.5
MOST_ALERTS_S, MOST_UNCHANGED_S = 10.0, 1.0
MOST_MIB = 500.0 / 1.048576

VISIBLE = """
(() => {
  const look = () => {
    const rows = [...document.querySelectorAll('#overview table tbody tr')];
    if (!rows.some(row => row.getBoundingClientRect().height)) return requestAnimationFrame(look);
    requestAnimationFrame(() => setTimeout(() => { window.firstTable = performance.now(); }));
  };
  requestAnimationFrame(look);
})();
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one command."""

    seconds: float
    cpu_s: float
    peak_mib: float


def make_database(location: str, series: int, nights: int) -> int:
    """Write made-up nights of so many series; return the number of measurements."""
    noise = random.Random(10)  # noqa: S311
    subjects = range(series // len(METRICS))
    with ResultsStore.open(location) as store:
        return sum(_write_night(store, night, subjects, noise) for night in range(nights))


def _write_night(
    store: ResultsStore, night: int, subjects: Sequence[int], noise: random.Random
) -> int:
    runs = [_run(night, subject, noise) for subject in subjects]
    values = [row for run in runs for row in _values(run, noise)]
    with store.database.writing() as connection:
        rows = [{**row_of(run), "writer": this_writer()} for run in runs]
        connection.execute(insert(schema.runs), rows)
        connection.execute(insert(schema.measurements), values)
    return len(values)


def _run(night: int, subject: int, noise: random.Random) -> Run:
    rest, prompt = divmod(subject, len(PROMPTS))
    model, phone = divmod(rest, PHONES)
    at = START + timedelta(days=night, minutes=subject * 0.9 + noise.random())
    return Run(
        created_at=at,
        finished_at=at + timedelta(minutes=6),
        kind="bench",
        status="done",
        container=ContainerInfo(
            model=f"Llama-{model + 1}B",
            sha256=f"{night:032x}{model:032x}",
            target="SM8750",
            ars=(1, 128),
            cl=4096,
            n_splits=2,
            precision=("W4A16", "W8A16")[model % 2],
            size_bytes=(model + 1) << 29,
            parameters=(model + 1) << 30,
        ),
        device=DeviceInfo(
            serial=f"R3CX{phone:06d}",
            soc=f"SM{8350 + 100 * phone}",
            emulator=False,
            model=f"Galaxy S{21 + phone}",
            manufacturer="Samsung",
            android_version="15",
        ),
        workload=WorkloadRecord(
            runner="genie-t2t-run",
            prompt_tokens=PROMPTS[prompt],
            max_new_tokens=128,
            repetitions=REPETITIONS,
            warmup=WARMUPS,
        ),
        provenance=Provenance(
            toolchain="ort_qnn",
            toolchain_versions={"qnn": "2.51"},
            library_versions={"genie": "1.21"},
            qnnfarm_version="0.1.0",
            host="lab (Linux x86_64)",
            git_commit=f"{night * 7919:040x}",
        ),
        check=OutputCheck(outcome="passed", reason="made up"),
        warmup_detected=True,
    )


def _values(run: Run, noise: random.Random) -> Iterator[dict[str, object]]:
    base = 50 * (1 + noise.gauss(0, 0.01))
    for number in range(WARMUPS + REPETITIONS):
        is_warmup = number < WARMUPS
        rate = base * (1 + noise.gauss(0, 0.004))
        for metric, value in zip(METRICS, (28 * rate, rate, 2 / rate), strict=True):
            yield {
                "run_id": run.id,
                "metric": metric,
                "is_warmup": is_warmup,
                "repetition": number if is_warmup else number - WARMUPS,
                "value": value,
            }


def measure(*arguments: str) -> Cost:
    """Run a command of qnnfarm in a process of its own, and measure it."""
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.execv(sys.executable, [sys.executable, "-m", "harness.cli", *arguments])  # noqa: S606
    _, status, used = os.wait4(child, 0)
    seconds = time.perf_counter() - began
    if status != 0:
        sys.exit(f"qnnfarm {arguments[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def first_table_s(report: Path, times: int = 3) -> float:
    """Return the seconds until a table's first row is on the screen, the best of some loads."""
    found = []
    with open_browser() as browser:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": VISIBLE})
        for _ in range(times):
            browser.get("about:blank")
            browser.get(report.absolute().as_uri())
            while (moment := browser.execute_script("return window.firstTable")) is None:
                time.sleep(0.02)
            found.append(float(moment) / 1000)
    return min(found)


def main() -> None:
    """Measure, print a table, and tell by the exit code whether the limits are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--series", type=int, default=500)
    parser.add_argument("--nights", type=int, default=365)
    parser.add_argument("--folder", type=Path, help="keeps database and report there")
    parser.add_argument("--db", help="an empty database in PostgreSQL, in place of a file")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        file, out = folder / "results.db", folder / "report.html"
        file.unlink(missing_ok=True)
        database = chosen.db or str(file)
        written = make_database(database, chosen.series, chosen.nights)
        print(f"{written:,} measurements of {chosen.series} series over {chosen.nights} nights\n")
        alerts, unchanged = (measure("alerts", "ls", "--db", database) for _ in range(2))
        with ResultsStore.open(database) as store:
            few = range(chosen.series // len(METRICS) // 10)
            _write_night(store, chosen.nights, few, random.Random(11))  # noqa: S311
        news = measure("alerts", "ls", "--db", database)
        made = ("report", "--db", database, "--out", str(out))
        measure(*made)  # bundles the charts' script where the cache has none
        cost = measure(*made)
        size = out.stat().st_size / 1e6
        visible = first_table_s(out)
    rows = (
        ("alerts ls, s", alerts.seconds, MOST_ALERTS_S),
        ("peak memory, MiB", alerts.peak_mib, MOST_MIB),
        ("alerts ls with nothing new, s", unchanged.seconds, MOST_UNCHANGED_S),
        ("alerts ls after a night of a tenth, s", news.seconds, MOST_ALERTS_S / 4),
        ("report made, s", cost.seconds, MOST_REPORT_S),
        ("peak memory, MiB", cost.peak_mib, MOST_MIB),
        ("size, MB", size, MOST_MB),
        ("first table visible, s", visible, MOST_VISIBLE_S),
    )
    print("| | measured | limit |\n| --- | ---: | ---: |")
    for words, found, limit in rows:
        print(f"| {words} | {found:.2f} | {limit:g} |")
    load = ", ".join(f"{one:.0f}" for one in os.getloadavg())
    cpu = ", ".join(f"{one.cpu_s:.1f}" for one in (alerts, unchanged, news, cost))
    print(f"\nCPU time of the commands {cpu} s; load of the machine {load}")
    sys.exit(any(found > limit for _, found, limit in rows))


if __name__ == "__main__":
    main()
