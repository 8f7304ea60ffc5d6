"""A lab's day: sessions on phones with conditions, checks and telemetry, and a comparison."""

import math
import random
from collections.abc import Sequence

from harness.results.records import Condition, OutputCheck, Run, TelemetrySeries
from harness.results.store import ResultsStore
from tests.reports.conftest import Sample, speeds

CELL, COMPARISON = "c" * 32, "d" * 32
COOL: Condition = {
    "name": "thermal_gate",
    "outcome": "met",
    "reason": "the hottest zone, skin, is at or below 35 C",
    "waited_s": 41.2,
    "before": 38.5,
    "after": 34.9,
}
HOT: Condition = {
    "name": "throttling",
    "outcome": "seen",
    "reason": "repetition 3: cpu_cap_hz:7 fell from 4320 to 2745 MHz at 8.1 s",
}
PASSED = OutputCheck(outcome="passed", reason="the tokens of reference.txt")


def sessions() -> list[Run]:
    """Four gated sessions of one cell, the last of which throttled."""
    phone = Sample("SM8750", emulator=False, model="Llama-3.2-1B")
    made = []
    for number, shift in enumerate((0.0, 0.004, -0.006, -0.012)):
        rates = [rate * (1 + shift) for rate in (41.0, 53.6, 53.7, 53.5)]
        values = speeds([24 * rate for rate in rates], rates, [2 / rate for rate in rates], 1310)
        made.append(
            phone.run(
                100 + number,
                "bench",
                values,
                group_id=CELL,
                session=number,
                conditions=(COOL, HOT) if number == 3 else (COOL,),
                check=PASSED,
                warmup_detected=True,
            )
        )
    return made


def comparison(loss: float = 0.08) -> list[Run]:
    """Six pairs of sessions; B is slower by `loss`."""
    phone = Sample("SM8750", emulator=False, model="Llama-3.2-1B")
    made = []
    for number in range(6):
        for side, factor in (("A", 1.0), ("B", 1 - loss)):
            rate = 50 * factor * (1 - 0.004 * number)
            run = phone.run(
                200 + 2 * number + (side == "B"),
                "bench",
                speeds([rate * 20] * 4, [rate] * 4, [0.04] * 4, 1310),
                group_id=COMPARISON,
                session=number,
                label=side,
            )
            if side == "B":
                changed = run.container.model_copy(update={"sha256": "b" * 64})
                run = run.model_copy(update={"container": changed})
            made.append(run)
    return made


def samples_of(run: Run, *, seconds: int = 12, zones: int = 9) -> list[TelemetrySeries]:
    """One repetition's telemetry at 10 Hz, made up."""
    source = random.Random(run.id)  # noqa: S311
    times = tuple(n / 10 for n in range(10 * seconds))
    heat = [1 - math.exp(-moment / 5) for moment in times]
    made = [
        TelemetrySeries(
            f"temp_c:zone-{zone}",
            "degC",
            times,
            tuple(round(34 + (zone + 2) * 3 * h + source.gauss(0, 0.2), 1) for h in heat),
        )
        for zone in range(zones)
    ]
    clocks = tuple(
        None if 30 < n < 34 else source.choice((3.8e9, 4.32e9)) for n, _ in enumerate(times)
    )
    memory = tuple(float(int(1.3e9 * min(1, 0.2 + moment / 3))) for moment in times)
    current = tuple(round(-0.9 - 0.4 * h + source.gauss(0, 0.03), 4) for h in heat)
    return [
        *made,
        TelemetrySeries("cpu_hz:7", "Hz", times, clocks),
        TelemetrySeries("rss_bytes", "bytes", times, memory),
        TelemetrySeries("battery_a", "A", times, current),
        TelemetrySeries("battery_v", "V", times, (3.91,) * len(times)),
    ]


def add_telemetry(store: ResultsStore, runs: Sequence[Run]) -> None:
    """Write runs that are done, as a recorder would have: telemetry first, then the end."""
    for run in runs:
        recorder = store.begin_run(run.model_copy(update={"status": "running"}))
        for repetition in range(3):
            recorder.add_telemetry(samples_of(run), repetition=repetition)
        recorder.add_telemetry(samples_of(run), repetition=0, is_warmup=True)
        recorder.finish()
